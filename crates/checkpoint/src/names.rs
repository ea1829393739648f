//! Names in checkpoints and state files, and checksums as text.

use fusestep_tensor::Role;
use xxhash_rust::xxh3::xxh3_64;

/// Metadata key of the checksum of a file's other metadata; with a tensor's name, of its bytes.
pub(crate) const SUM: &str = "xxh3";

/// Metadata key of the number of values that are not finite, before the tensor's name.
const NON_FINITE: &str = "non_finite@";

/// Name of the file of whole parameters in the folder of a generation.
pub const MODEL_FILE: &str = "model.safetensors";

/// Suffixes of two generations of one step, so that two saves of a step never write to one folder.
pub(crate) const TURNS: [&str; 2] = ["a", "b"];

pub(crate) fn shard_file(shard: usize) -> String {
    format!("shard-{shard:05}.safetensors")
}

pub(crate) fn checksum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

/// Whether a name is one that a generation's folder has.
pub(crate) fn is_name(name: &str) -> bool {
    let step = name.strip_prefix("step-").and_then(|rest| rest.rsplit_once('-'));
    step.is_some_and(|(step, turn)| {
        step.len() >= 8 && step.bytes().all(|byte| byte.is_ascii_digit()) && TURNS.contains(&turn)
    })
}

/// Whether a name is one that [`shard_file`] gives.
pub(crate) fn is_shard(name: &str) -> bool {
    let number = name.strip_prefix("shard-").and_then(|rest| rest.strip_suffix(".safetensors"));
    number
        .is_some_and(|number| number.len() >= 5 && number.bytes().all(|byte| byte.is_ascii_digit()))
}

pub(crate) fn tensor_name(param: &str, role: Role) -> String {
    format!("{param}@{role}")
}

pub(crate) fn non_finite_key(tensor: &str) -> String {
    format!("{NON_FINITE}{tensor}")
}

pub(crate) fn sum_key(tensor: &str) -> String {
    format!("{SUM}@{tensor}")
}
