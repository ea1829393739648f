//! `kernels/machine_code`: what was assembled for the devices that most programs meet, a bundle for
//! each.

#[path = "../../../kernels/src/bundle.rs"]
mod bundle;

use std::{fmt::Write, fs, path::Path};

use anyhow::{Context, Result};
use miniz_oxide::deflate::compress_to_vec;

use crate::ptx::Mode;

/// A100, H100 and H200, B200, and what later devices of their kinds run too. Others compile PTX.
const DEVICES: [&str; 3] = ["sm_80", "sm_90", "sm_100"];

/// The most that the packer knows.
const LEVEL: u8 = 10;

/// Name and code of an entry.
type Code = (String, Vec<u8>);

/// Writes the bundles of the entries that `assembled` has for each device, or says where those that
/// are checked in depart from them.
pub(crate) fn bundle(
    mode: Mode,
    checked_in: &Path,
    assembled: &Path,
    entries: &[String],
) -> Result<Vec<String>> {
    fs::create_dir_all(checked_in)?;
    let mut differences = Vec::new();
    let mut len_bytes = 0;
    for device in DEVICES {
        let codes = entries.iter().map(|entry| {
            let path = assembled.join(format!("{entry}.{device}.cubin"));
            let code = fs::read(&path).with_context(|| path.display().to_string())?;
            Ok((entry.clone(), code))
        });
        let codes: Vec<Code> = codes.collect::<Result<_>>()?;
        let path = checked_in.join(device);
        let found = fs::read(&path).unwrap_or_default();
        if let Some(difference) = difference(&found, &codes) {
            // What packs to other bytes with another release of the packer is left as it is.
            match mode {
                Mode::Write => fs::write(&path, pack(&codes))?,
                Mode::Check => differences.push(format!("{}: {difference}", path.display())),
            }
        }
        len_bytes += fs::metadata(&path).map_or(0, |file| file.len());
    }
    println!(
        "machine code of {} entries for {}: {len_bytes} bytes",
        entries.len(),
        DEVICES.join(", ")
    );
    Ok(differences)
}

/// Says where a bundle departs from the code that it should hold.
fn difference(found: &[u8], expected: &[Code]) -> Option<String> {
    let Some(found) = bundle::entries(found) else {
        return Some("expected a bundle of machine code, found none".to_owned());
    };
    let names = |names: Vec<&str>| names.join(", ");
    let found_names = names(found.iter().map(|packed| packed.entry).collect());
    let expected_names = names(expected.iter().map(|(entry, _)| entry.as_str()).collect());
    if found_names != expected_names {
        return Some(format!("expected {expected_names}, found {found_names}"));
    }
    let mut pairs = found.iter().zip(expected);
    let other = pairs.find(|(packed, (_, code))| packed.unpacked().as_ref() != Some(code));
    other
        .map(|(packed, _)| format!("the code of {} is not what its PTX assembles to", packed.entry))
}

fn pack(codes: &[Code]) -> Vec<u8> {
    let packed: Vec<Vec<u8>> = codes.iter().map(|(_, code)| compress_to_vec(code, LEVEL)).collect();
    let mut head = bundle::MAGIC.to_owned();
    for ((entry, code), packed) in codes.iter().zip(&packed) {
        let _ = writeln!(head, "{entry} {} {}", code.len(), packed.len());
    }
    head.push('\n');
    [head.into_bytes(), packed.concat()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes() -> Vec<Code> {
        let code = |name: &str, byte: u8| (name.to_owned(), vec![byte; 40_000]);
        vec![code("one", 1), code("two", 2)]
    }

    #[test]
    fn a_bundle_holds_what_was_packed() {
        let packed = pack(&codes());
        assert!(packed.len() < 1000, "{}", packed.len());
        assert_eq!(difference(&packed, &codes()), None);
        assert_eq!(packed, pack(&codes()));
    }

    #[test]
    fn bundles_of_other_code_are_named() {
        let packed = pack(&codes());
        let mut other = codes();
        other[1].1[39_999] = 0;
        assert_eq!(
            difference(&packed, &other).unwrap(),
            "the code of two is not what its PTX assembles to"
        );
        assert_eq!(difference(&packed, &other[..1]).unwrap(), "expected one, found one, two");
        assert!(difference(b"", &other).unwrap().ends_with("found none"));
    }
}
