//! Which features of crates from elsewhere a library may turn on: cargo turns them on for all of
//! the program that depends on it.

/// Features that add items and change nothing that is there without them.
const ADDITIVE: [(&str, &[&str]); 11] = [
    ("bytemuck", &["derive"]),
    ("clap", &["derive"]),
    ("cust", &["bytemuck"]),
    ("half", &["bytemuck"]),
    ("log", &["std"]),
    ("miniz_oxide", &["with-alloc"]),
    ("pyo3", &["abi3-py39", "extension-module"]),
    ("rustix", &["fs", "mm", "param", "process", "system", "thread", "time"]),
    ("serde", &["derive"]),
    ("plotters", &["area_series", "line_series", "svg_backend"]),
    ("xxhash-rust", &["xxh3"]),
];

/// Packages that nobody's program depends on.
const PROGRAMS: [&str; 8] = [
    "crates/cli",
    "crates/python",
    "tools/cuda-emulator",
    "tools/testkit",
    "tests",
    "benches",
    "tools/fuzz",
    "tools/xtask",
];

/// What is wrong with the manifest of the package in `folder`, or of the workspace in ``.
pub(crate) fn violations(folder: &str, manifest: &str) -> Vec<String> {
    if PROGRAMS.contains(&folder) {
        return Vec::new();
    }
    let asked = features(manifest).into_iter().filter(|(package, feature)| {
        let known = ADDITIVE.iter().find(|(name, _)| name == package);
        let additive = known.is_some_and(|(_, features)| features.contains(&feature.as_str()));
        !additive && !package.starts_with("fusestep")
    });
    let told = asked.map(|(package, feature)| {
        format!(
            "{folder}/Cargo.toml: expected features of tests/tidy/features.rs, which change \
             nothing in a user's program, found `{feature}` of {package}"
        )
    });
    told.collect()
}

/// The features that dependencies are asked for, but those that tests alone see.
fn features(manifest: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut table = "";
    let mut lines = manifest.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if let Some(header) = line.strip_prefix('[') {
            table = header.trim_end_matches(']');
            continue;
        }
        let of_users = table.contains("dependencies") && !table.contains("dev-dependencies");
        let Some((key, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) else {
            continue;
        };
        let (key, in_table) = (key.trim(), table.rsplit_once("dependencies."));
        let list = match (value.split_once("features = ["), in_table) {
            (Some((before, list)), None) if !before.ends_with("default-") => list,
            (None, Some(_)) if key == "features" => value,
            _ => continue,
        };
        let mut list = list.to_owned();
        while !list.contains(']') {
            list.push_str(lines.next().unwrap_or("]"));
        }
        let package = in_table.map_or(key, |(_, name)| name).trim_matches('"');
        let list = list.split(']').next().unwrap_or_default();
        let names = list.split('"').skip(1).step_by(2);
        found.extend(names.filter(|_| of_users).map(|name| (package.to_owned(), name.to_owned())));
    }
    found
}

#[test]
fn features_of_every_form_are_read() {
    let manifest = "[features]\nx = [\"dep:a\"]\n[dependencies]\n\
        a = { version = \"1\", default-features = false, features = [\"b\", \"c\"] }\nd = \"1\"\n\
        # e = { features = [\"f\"] }\n[target.'cfg(unix)'.dependencies.g]\nversion = \"1\"\n\
        features = [\n\"h\",\n\"i\",\n]\n[dev-dependencies]\nj = { features = [\"k\"] }\n\
        [workspace.dependencies]\nl = { version = \"1\", features = [\"m\"] }\n";
    let found = features(manifest);
    let expected = [("a", "b"), ("a", "c"), ("g", "h"), ("g", "i"), ("l", "m")];
    assert_eq!(found, expected.map(|(package, name)| (package.to_owned(), name.to_owned())));
}

#[test]
fn features_that_change_a_program_are_found() {
    let asks = |name: &str, feature: &str| {
        format!("[dependencies]\n{name} = {{ workspace = true, features = [\"{feature}\"] }}\n")
    };
    for (folder, name, feature, expected) in [
        ("crates/planner", "serde_json", "preserve_order", 1),
        ("crates/planner", "serde_json", "raw_value", 1),
        ("crates/coalesce", "bytemuck", "extern_crate_alloc", 1),
        ("crates/coalesce", "bytemuck", "derive", 0),
        ("crates/planner", "fusestep-tensor", "serde", 0),
        ("crates/cli", "serde_json", "preserve_order", 0),
    ] {
        let found = violations(folder, &asks(name, feature));
        assert_eq!(found.len(), expected, "{folder} {name} {feature}: {found:?}");
    }
}
