//! A header's entries in file order, names given twice included.
//!
//! `serde_json` offers order and raw text as features, `preserve_order` and `raw_value`. A feature
//! holds for the whole program, so a user's own JSON would come out in another order.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

/// The key that holds text about the file instead of a tensor.
pub(crate) const METADATA_KEY: &str = "__metadata__";

/// Most tensors, and most texts about the file, that a header may have.
pub(crate) const MAX_ENTRIES: usize = 1 << 21;

/// Most bytes of a tensor's dtype, shape and offsets: enough for more than a hundred extents.
pub(crate) const MAX_ENTRY_BYTES: usize = 4_096;

/// All keys of a JSON object and the text of their values, in order. An ordinary map would keep one
/// of two equal keys and hide the other. Values are not parsed, so entries take no more memory than
/// a few times their text.
pub(crate) struct Entries<'a>(pub(crate) Vec<(Cow<'a, str>, &'a str)>);

/// The names of a JSON object and the text of their values, in the text's order. A name that is
/// given twice comes twice. `None` for a text that is no JSON object.
///
/// A number's text keeps all its digits. `str::parse` rounds it to the nearest, which `serde_json`
/// does only with a feature.
///
/// ```
/// # use fusestep_tensor_file::object_entries;
/// let entries = object_entries(r#" {"b": [1, 2.50], "a\u0062": {}} "#).unwrap();
/// assert_eq!(entries, [("b".into(), "[1, 2.50]"), ("ab".into(), "{}")]);
/// assert!(object_entries("[1]").is_none() && object_entries(r#"{"a": 1} 2"#).is_none());
/// ```
pub fn object_entries(text: &str) -> Option<Vec<(Cow<'_, str>, &str)>> {
    entries_up_to(text, usize::MAX)
}

/// [`object_entries`], or `None` for more than `most` entries, before they take memory.
fn entries_up_to(text: &str, most: usize) -> Option<Vec<(Cow<'_, str>, &str)>> {
    let mut rest = Rest(text);
    rest.skip('{')?;
    let mut entries = Vec::new();
    if rest.skip('}').is_none() {
        loop {
            let (Name(name), _) = rest.value()?;
            rest.skip(':')?;
            let (IgnoredAny, value) = rest.value()?;
            if entries.len() == most {
                return None;
            }
            entries.push((name, value));
            if rest.skip(',').is_none() {
                break;
            }
        }
        rest.skip('}')?;
    }
    rest.without_space().is_empty().then_some(entries)
}

/// Unread rest of a JSON text.
struct Rest<'a>(&'a str);

impl<'a> Rest<'a> {
    fn without_space(&self) -> &'a str {
        self.0.trim_start_matches([' ', '\t', '\n', '\r'])
    }

    /// Goes past a mark, if it comes next.
    fn skip(&mut self, mark: char) -> Option<()> {
        self.0 = self.without_space().strip_prefix(mark)?;
        Some(())
    }

    /// The next value and its text.
    fn value<T: Deserialize<'a>>(&mut self) -> Option<(T, &'a str)> {
        let text = self.without_space();
        let mut values = serde_json::Deserializer::from_str(text).into_iter();
        let value = values.next()?.ok()?;
        let (text, rest) = text.split_at(values.byte_offset());
        self.0 = rest;
        Some((value, text))
    }
}

/// A name, borrowed where it has no escapes.
struct Name<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Name<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = Cow<'de, str>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Cow::Borrowed(text))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Cow::Owned(text.to_owned()))
            }
        }

        deserializer.deserialize_str(Either).map(Name)
    }
}

/// Check of a header that keeps no entries: its error says what is wrong with a text, and where.
struct Checked;

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Counted;

        impl<'de> Visitor<'de> for Counted {
            type Value = Checked;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object that maps tensor names to dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Checked, A::Error> {
                let mut count = 0;
                while map.next_entry::<Name<'_>, IgnoredAny>()?.is_some() {
                    if count == MAX_ENTRIES {
                        let expected = format!("at most {MAX_ENTRIES} entries");
                        return Err(A::Error::custom(format!("expected {expected}, found more")));
                    }
                    count += 1;
                }
                Ok(Checked)
            }
        }

        deserializer.deserialize_map(Counted)
    }
}

impl<'a> Entries<'a> {
    /// The entries of a JSON object, or why there are none.
    pub(crate) fn read(text: &'a str) -> Result<Self, String> {
        match entries_up_to(text, MAX_ENTRIES) {
            Some(entries) => Ok(Self(entries)),
            None => match serde_json::from_str::<Checked>(text) {
                Ok(Checked) => Err("an object that cannot be taken apart".to_owned()),
                Err(error) => Err(error.to_string()),
            },
        }
    }
}

impl Entries<'_> {
    /// The first name that occurs more than once, and how often.
    pub(crate) fn duplicate(&self) -> Option<(&str, usize)> {
        let mut names: Vec<&str> = self.0.iter().map(|(name, _)| name.as_ref()).collect();
        names.sort_unstable();
        let twice = names.windows(2).find(|pair| pair[0] == pair[1])?[0];
        let count = names.iter().filter(|name| **name == twice).count();
        Some((twice, count))
    }

    /// The first tensor whose description is longer than any tensor needs, and its length.
    pub(crate) fn too_long(&self) -> Option<(&str, usize)> {
        let tensors = self.0.iter().filter(|(name, _)| name != METADATA_KEY);
        let mut lengths = tensors.map(|(name, value)| (name.as_ref(), value.len()));
        lengths.find(|(_, length)| *length > MAX_ENTRY_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_every_value_is_kept_as_it_stands() {
        let values = ["1", "-0.10e+2", "null", "true", r#""a\"}{,:""#, "[]", r#"[1, {"x": [ ]}]"#];
        for space in ["", " ", "\n\t\r "] {
            let entry = |value: &&str| format!("{space}\"k\"{space}:{space}{value}{space}");
            let texts: Vec<String> = values.iter().map(entry).collect();
            let text = format!("{space}{{{}}}{space}", texts.join(","));
            let found = object_entries(&text).unwrap();
            assert!(found.iter().map(|(_, value)| *value).eq(values), "{text}: {found:?}");
        }
        assert_eq!(object_entries("{ }"), Some(Vec::new()));
    }

    #[test]
    fn what_serde_refuses_is_refused_with_its_words() {
        for text in [
            "",
            "{",
            "[1]",
            "3",
            "{1:2}",
            r#"{"a"}"#,
            r#"{"a":}"#,
            r#"{"a":1,}"#,
            r#"{"a":1 2}"#,
            r#"{"a":1}}"#,
            r#"{"a":01}"#,
            r#"{"a":"\x"}"#,
            r#"{"a":[1}"#,
            r#"{"a":1"b":2}"#,
            r#"{,"a":1}"#,
            r#"{"a":nul}"#,
            r#"{"a":truefalse}"#,
        ] {
            assert_eq!(object_entries(text), None, "{text}");
            let error = serde_json::from_str::<Checked>(text).err().unwrap().to_string();
            assert_eq!(Entries::read(text).err(), Some(error), "{text}");
        }
    }
}
