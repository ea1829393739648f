//! Machine code for the devices that most programs meet, so that a driver has nothing to compile.

use crate::bundle;

/// Bundles by the compute capability that their code is for.
const BUNDLES: [(Capability, &str, &[u8]); 3] = [
    ((8, 0), "sm_80", include_bytes!("../machine_code/sm_80")),
    ((9, 0), "sm_90", include_bytes!("../machine_code/sm_90")),
    ((10, 0), "sm_100", include_bytes!("../machine_code/sm_100")),
];

/// Major and minor.
type Capability = (u32, u32);

/// Machine code of one entry, which a driver loads as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineCode {
    /// The device that it was assembled for, as `ptxas` names it: `sm_90`.
    pub target: &'static str,
    /// A file of machine code with one entry.
    pub image: Vec<u8>,
}

/// The machine code of one entry, such as `fused_adam_f32`, for a device of this compute capability
/// (major and minor); none if there is no such entry or no code that runs there.
///
/// Code runs on devices of its own major capability with the same minor one or a later one: code
/// for 8.0 on A100 (8.0), A10 (8.6) and RTX 4090 (8.9).
///
/// # Cost
/// 50 KB are unpacked, mostly zeros.
pub fn machine_code(entry: &str, capability: (u32, u32)) -> Option<MachineCode> {
    let (target, bundle) = bundle_for(capability)?;
    let entries = bundle::entries(bundle).expect("an embedded bundle is whole");
    let packed = entries.into_iter().find(|packed| packed.entry == entry)?;
    let image = packed.unpacked();
    Some(MachineCode { target, image: image.expect("what is embedded unpacks to its length") })
}

/// The newest bundle whose code runs on a device.
fn bundle_for((major, minor): Capability) -> Option<(&'static str, &'static [u8])> {
    let fitting = BUNDLES
        .iter()
        .filter(|((its_major, its_minor), ..)| *its_major == major && *its_minor <= minor);
    let newest = fitting.max_by_key(|(capability, ..)| *capability);
    newest.map(|(_, target, bundle)| (*target, *bundle))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{entries, stems};

    #[test]
    fn every_entry_has_code_for_every_device_and_no_other() {
        let mut expected: Vec<_> = stems().flat_map(|stem| entries(stem).unwrap()).collect();
        expected.sort_unstable();
        for (capability, target, bundle) in BUNDLES {
            let packed = bundle::entries(bundle).unwrap();
            let mut found: Vec<_> = packed.iter().map(|packed| packed.entry).collect();
            found.sort_unstable();
            assert_eq!(found, expected, "{target}: run `cargo xtask ptx`");
            for packed in packed {
                let code = machine_code(packed.entry, capability).unwrap();
                assert_eq!(code.target, target);
                assert!(is_for(&code, packed.entry), "{} for {target}", packed.entry);
            }
        }
    }

    /// Whether the image is an ELF file for the device that holds the entry.
    fn is_for(code: &MachineCode, entry: &str) -> bool {
        let device: u8 = code.target.trim_start_matches("sm_").parse().unwrap();
        // Flags at byte 48; from version 8 of the format on the device is in their second byte.
        let at = if code.image[8] >= 8 { 49 } else { 48 };
        let section = format!("\0.text.{entry}\0");
        code.image.starts_with(b"\x7fELF")
            && code.image[at] == device
            && code.image.windows(section.len()).any(|bytes| bytes == section.as_bytes())
    }

    #[test]
    fn code_is_chosen_by_the_device() {
        for (capability, expected) in [
            ((7, 0), None),
            ((7, 5), None),
            ((8, 0), Some("sm_80")),
            ((8, 6), Some("sm_80")),
            ((8, 9), Some("sm_80")),
            ((9, 0), Some("sm_90")),
            ((10, 0), Some("sm_100")),
            ((10, 3), Some("sm_100")),
            ((11, 0), None),
            ((12, 0), None),
        ] {
            let found = machine_code("lion_f32", capability).map(|code| code.target);
            assert_eq!(found, expected, "{capability:?}");
        }
        assert_eq!(machine_code("lion_f8", (9, 0)), None);
    }

    /// A registry takes 10 MB, and every change of a kernel adds to the history.
    #[test]
    fn the_bundles_are_at_most_6_mb() {
        let bytes: usize = BUNDLES.iter().map(|(.., bundle)| bundle.len()).sum();
        assert!(bytes <= 6_000_000, "{bytes} bytes");
    }
}
