//! Diagnosis of a file that the format's library refuses.

use std::path::Path;

use safetensors::Dtype;
use serde_json::Value;

use crate::TensorFileError;
use crate::header::{Entries, MAX_ENTRIES, MAX_ENTRY_BYTES, METADATA_KEY};

/// Most bytes of a header, as the format's library limits it.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes before the header: its length.
const LENGTH_BYTES: u64 = 8;

/// The header's text.
pub(crate) fn header<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str, TensorFileError> {
    let found = bytes.len() as u64;
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(length_error(path, "header length", LENGTH_BYTES, found));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(TensorFileError::HeaderTooLong {
            path: path.to_owned(),
            expected: MAX_HEADER_BYTES,
            found: length,
        });
    }
    let Some(header) = rest.get(..length as usize) else {
        let there = found - LENGTH_BYTES;
        return Err(length_error(path, "header", length, there));
    };
    std::str::from_utf8(header).map_err(|error| TensorFileError::Header {
        path: path.to_owned(),
        reason: format!("expected UTF-8 text, found {error}"),
    })
}

/// The entries of a header, each name once and none longer than a tensor can need.
pub(crate) fn entries<'a>(path: &Path, header: &'a str) -> Result<Entries<'a>, TensorFileError> {
    let entries = Entries::read(header).map_err(|error| TensorFileError::Header {
        path: path.to_owned(),
        reason: format!("expected JSON, found an error: {error}"),
    })?;
    if let Some((name, found)) = entries.duplicate() {
        return Err(TensorFileError::DuplicateName {
            path: path.to_owned(),
            name: name.to_owned(),
            found,
        });
    }
    if let Some((name, found)) = entries.too_long() {
        let wrong = Wrong {
            what: "description",
            expected: format!("at most {MAX_ENTRY_BYTES} bytes of dtype, shape and data_offsets"),
            found: format!("{found} bytes"),
        };
        return Err(wrong.of(path, name));
    }
    let texts = entries.0.iter().find(|(name, _)| name == METADATA_KEY);
    if let Some((name, texts)) = texts
        && let Err(wrong) = metadata(texts)
    {
        return Err(wrong.of(path, name));
    }
    Ok(entries)
}

/// The error if the entries do not describe `data_bytes` of tensors; `None` if no fault is found.
pub(crate) fn tensors(
    path: &Path,
    entries: &Entries<'_>,
    data_bytes: u64,
) -> Option<TensorFileError> {
    let mut spans = Vec::with_capacity(entries.0.len());
    for (name, value) in &entries.0 {
        if name == METADATA_KEY {
            continue;
        }
        // Entries have been parsed as JSON once, as a whole.
        let value: Value = serde_json::from_str(value).unwrap_or_default();
        match tensor(&value) {
            Ok((begin, end)) => spans.push((begin, end, name)),
            Err(wrong) => return Some(wrong.of(path, name)),
        }
    }
    spans.sort_unstable();
    let mut covered = 0;
    let mut before = "the start of the data".to_owned();
    for (begin, end, name) in spans {
        if begin != covered {
            let what =
                if begin < covered { "data_offsets overlap" } else { "data_offsets leave a gap" };
            let wrong = Wrong {
                what,
                expected: format!("a begin of {covered}, where {before} ends"),
                found: begin.to_string(),
            };
            return Some(wrong.of(path, name));
        }
        covered = end;
        before = format!("`{name}`");
    }
    (covered != data_bytes).then(|| length_error(path, "tensor data", covered, data_bytes))
}

fn length_error(path: &Path, what: &'static str, expected: u64, found: u64) -> TensorFileError {
    TensorFileError::Length { path: path.to_owned(), what, expected, found }
}

/// Fault of one entry: the property, its expected and its found value.
struct Wrong {
    what: &'static str,
    expected: String,
    found: String,
}

impl Wrong {
    fn of(self, path: &Path, name: &str) -> TensorFileError {
        TensorFileError::Tensor {
            path: path.to_owned(),
            name: name.to_owned(),
            what: self.what,
            expected: self.expected,
            found: self.found,
        }
    }
}

/// Whether the metadata of a file are texts, and no more of them than a file may have.
fn metadata(value: &str) -> Result<(), Wrong> {
    let wrong = |expected: &str, found: String| Wrong {
        what: "metadata",
        expected: expected.to_owned(),
        found,
    };
    let texts = Entries::read(value).map_err(|_| wrong("an object of texts", value.to_owned()))?;
    if texts.0.len() > MAX_ENTRIES {
        let expected = format!("at most {MAX_ENTRIES} texts");
        return Err(wrong(&expected, texts.0.len().to_string()));
    }
    match texts.0.iter().find(|(_, value)| !value.starts_with('"')) {
        Some((_, value)) => Err(wrong("an object of texts", (*value).to_owned())),
        None => Ok(()),
    }
}

/// A tensor's begin and end in the data.
fn tensor(value: &Value) -> Result<(u64, u64), Wrong> {
    let field = |what, key| {
        value.get(key).ok_or_else(|| Wrong {
            what,
            expected: format!("a field `{key}`"),
            found: value.to_string(),
        })
    };
    let text = field("dtype", "dtype")?;
    let dtype = Dtype::deserialize_name(text).ok_or_else(|| Wrong {
        what: "dtype",
        expected: "a dtype of the safetensors format such as F32, F64, F16 or BF16".into(),
        found: text.to_string(),
    })?;
    let shape = counts("shape", field("shape", "shape")?)?;
    let offsets = counts("data_offsets", field("data_offsets", "data_offsets")?)?;
    let &[begin, end] = offsets.as_slice() else {
        return Err(Wrong {
            what: "data_offsets",
            expected: "two numbers".into(),
            found: format!("{offsets:?}"),
        });
    };
    let bits = shape.iter().try_fold(dtype.bitsize() as u64, |bits, &dim| bits.checked_mul(dim));
    let Some(len_bytes) = bits.map(|bits| bits.div_ceil(8)) else {
        return Err(Wrong {
            what: "shape",
            expected: "a length in bytes below 2^61".into(),
            found: format!("{shape:?}"),
        });
    };
    if end.checked_sub(begin) != Some(len_bytes) {
        return Err(Wrong {
            what: "shape and data_offsets disagree",
            expected: format!("{len_bytes} bytes for shape {shape:?} of {text}"),
            found: format!("data_offsets [{begin}, {end}]"),
        });
    }
    Ok((begin, end))
}

fn counts(what: &'static str, value: &Value) -> Result<Vec<u64>, Wrong> {
    let counts = value.as_array().and_then(|array| array.iter().map(Value::as_u64).collect());
    counts.ok_or_else(|| Wrong {
        what,
        expected: "a list of counts".into(),
        found: value.to_string(),
    })
}

/// Reads a dtype's name as the library does.
trait DeserializeName: Sized {
    fn deserialize_name(value: &Value) -> Option<Self>;
}

impl DeserializeName for Dtype {
    fn deserialize_name(value: &Value) -> Option<Self> {
        serde_json::from_value(value.clone()).ok()
    }
}
