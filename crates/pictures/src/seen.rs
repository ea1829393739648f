//! Pictures as a reader sees them, for tests: where texts begin and end.

/// A text and its place, in units of the file.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) start: f64,
    pub(crate) end: f64,
    /// Height of the line that the text stands on.
    pub(crate) y: f64,
    pub(crate) font: f64,
    pub(crate) text: String,
}

/// All texts of a picture, if a character is as wide as a digit of a wide font.
pub(crate) fn texts(svg: &str) -> Vec<Seen> {
    let texts = svg.split("<text ").skip(1).map(|rest| {
        let (attributes, rest) = rest.split_once('>').unwrap();
        let shown = rest.split_once("</text>").unwrap().0.trim();
        let text = shown.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
        let [x, y, font] = ["x", "y", "font-size"].map(|key| number(attributes, key));
        let width = 0.636 * font * text.chars().count() as f64;
        let start = match attribute(attributes, "text-anchor") {
            "end" => x - width,
            "middle" => x - width / 2.0,
            _ => x,
        };
        let down = match attribute(attributes, "dy") {
            "0.76em" => 0.76,
            "0.5ex" => 0.26,
            "-0.5ex" => -0.26,
            other => panic!("{other} in {attributes}"),
        };
        Seen { start, end: start + width, y: y + down * font, font, text }
    });
    texts.collect()
}

/// Width of the frame.
pub(crate) fn width(svg: &str) -> f64 {
    frame(svg)[0]
}

/// Height of the frame.
pub(crate) fn height(svg: &str) -> f64 {
    frame(svg)[1]
}

fn frame(svg: &str) -> [f64; 2] {
    let sizes = attribute(svg, "viewBox").strip_prefix("0 0 ").unwrap();
    let (width, height) = sizes.split_once(' ').unwrap();
    [width, height].map(|size| size.parse().unwrap())
}

/// An attribute's number.
pub(crate) fn number(of: &str, key: &str) -> f64 {
    attribute(of, key).parse().unwrap()
}

/// An attribute's text; attributes are apart by a space.
pub(crate) fn attribute<'s>(of: &'s str, key: &str) -> &'s str {
    let start = format!("{key}=\"");
    let found = of.strip_prefix(&start);
    let found = found.or_else(|| Some(of.split_once(&format!(" {start}"))?.1));
    found.unwrap_or_else(|| panic!("{key} in {of}")).split('"').next().unwrap()
}
