//! A header's entries in file order, names given twice included.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The key that holds text about the file instead of a tensor.
pub(crate) const METADATA_KEY: &str = "__metadata__";

/// Most tensors, and most texts about the file, that a header may have.
pub(crate) const MAX_ENTRIES: usize = 1 << 21;

/// Most bytes of a tensor's dtype, shape and offsets: enough for more than a hundred extents.
pub(crate) const MAX_ENTRY_BYTES: usize = 4_096;

/// All keys of a JSON object and the text of their values, in order; an ordinary map would keep one
/// of two equal keys and hide the other. Values are not parsed, so entries take no more memory than
/// a few times their text.
pub(crate) struct Entries<'a>(pub(crate) Vec<(Cow<'a, str>, &'a RawValue)>);

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

impl<'de: 'a, 'a> Deserialize<'de> for Entries<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object that maps tensor names to dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<'de>, A::Error> {
                let mut entries = Vec::new();
                while let Some((Name(name), value)) = map.next_entry()? {
                    if entries.len() == MAX_ENTRIES {
                        let expected = format!("at most {MAX_ENTRIES} entries");
                        return Err(A::Error::custom(format!("expected {expected}, found more")));
                    }
                    entries.push((name, value));
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(InOrder)
    }
}

impl Entries<'_> {
    /// The first name that stands there more than once, and how often.
    pub(crate) fn duplicate(&self) -> Option<(&str, usize)> {
        let mut names: Vec<&str> = self.0.iter().map(|(name, _)| name.as_ref()).collect();
        names.sort_unstable();
        let twice = names.windows(2).find(|pair| pair[0] == pair[1])?[0];
        let count = names.iter().filter(|name| **name == twice).count();
        Some((twice, count))
    }

    /// The first tensor whose description is longer than any could be, and its length.
    pub(crate) fn too_long(&self) -> Option<(&str, usize)> {
        let tensors = self.0.iter().filter(|(name, _)| name != METADATA_KEY);
        let mut lengths = tensors.map(|(name, value)| (name.as_ref(), value.get().len()));
        lengths.find(|(_, length)| *length > MAX_ENTRY_BYTES)
    }
}
