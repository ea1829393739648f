//! The CUDA kernels, their PTX as text and machine code of it, embedded; needs no CUDA to build.
//!
//! A kernel's stem names its source `STEM.cu` and its PTX `ptx/STEM.ptx`; `machine_code/sm_90` and
//! its like hold every entry assembled for one device. `cargo xtask ptx` generates all of it with a
//! pinned compiler and assembler, and it is checked in. So neither users nor their build machines
//! need a CUDA toolkit, and drivers need not compile for devices that there is code for.
//!
//! An entry takes one argument block, which `fusestep-launch` packs. Those of `rank_order` and
//! `accumulate` take a few words from `fusestep-collective-nccl` and `fusestep-cuda` instead.
#![forbid(unsafe_code)]

mod bundle;
mod machine_code;
mod single_entry;

pub use machine_code::{MachineCode, machine_code};

/// One kernel source and what was compiled from it.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    stem: &'static str,
    source: &'static str,
    ptx: &'static str,
}

/// The kernels by their stems.
macro_rules! kernels {
    ($($stem:ident)*) => {
        const KERNELS: &[Kernel] = &[$(Kernel {
            stem: stringify!($stem),
            source: include_str!(concat!("../", stringify!($stem), ".cu")),
            ptx: include_str!(concat!("../ptx/", stringify!($stem), ".ptx")),
        }),*];
    };
}

kernels! {
    accumulate
    adagrad
    adamax
    amp
    fused_adam
    fused_sgd
    lamb
    lars_momentum
    lion
    nadam
    rank_order
    rmsprop
    schedule_free
    tensor_sums
    update_sums
}

/// Files that kernel sources include, as (file name, text).
const HEADERS: &[(&str, &str)] = &[
    ("coded.cuh", include_str!("../coded.cuh")),
    ("codes.cuh", include_str!("../codes.cuh")),
    ("dialect.cuh", include_str!("../dialect.cuh")),
    ("elementwise.cuh", include_str!("../elementwise.cuh")),
    ("entries.cuh", include_str!("../entries.cuh")),
    ("multi_tensor.cuh", include_str!("../multi_tensor.cuh")),
    ("normed.cuh", include_str!("../normed.cuh")),
    ("normed_memory.cuh", include_str!("../normed_memory.cuh")),
    ("resident.cuh", include_str!("../resident.cuh")),
    ("storage.cuh", include_str!("../storage.cuh")),
    ("tree.cuh", include_str!("../tree.cuh")),
    ("update_sums.cuh", include_str!("../update_sums.cuh")),
];

/// Bytes of the one parameter of an entry that reads a table: 32,760, of the 32,764 that devices of
/// compute capability 7.0 or newer take from driver 530 on; older drivers do not read the PTX. A
/// shorter argument block is followed by bytes that the kernel does not read.
pub const TABLE_BYTES: usize = 32_760;

/// Bytes of the one parameter of an entry that derives the step scalars of a resident table: where
/// the table lies, and what they are derived from.
pub const STEP_SCALARS_ENTRY_BYTES: usize = 16;

/// The stems of all kernels, in alphabetical order.
pub fn stems() -> impl ExactSizeIterator<Item = &'static str> {
    KERNELS.iter().map(|kernel| kernel.stem)
}

/// The PTX of a kernel, or none if there is no kernel of that stem.
pub fn ptx(stem: &str) -> Option<&'static str> {
    find(stem).map(|kernel| kernel.ptx)
}

/// The PTX of one entry, such as `fused_adam_f32`, as a module of its own; none if there is none.
///
/// # Cost
/// One walk through the text of its kernel's module, of at most 1 MB; a driver then compiles this
/// entry and no other.
pub fn entry_ptx(entry: &str) -> Option<String> {
    single_entry::single_entry(ptx(stem_of_entry(entry)?)?, entry)
}

/// The CUDA C++ source of a kernel, or none if there is no kernel of that stem.
pub fn source(stem: &str) -> Option<&'static str> {
    find(stem).map(|kernel| kernel.source)
}

/// The files that kernel sources include, as (file name, text).
pub fn headers() -> &'static [(&'static str, &'static str)] {
    HEADERS
}

/// The kernel whose PTX holds `entry`, such as `fused_adam_f32`, as its stem; none if no kernel has
/// it.
pub fn stem_of_entry(entry: &str) -> Option<&'static str> {
    stems().find(|stem| entry.strip_prefix(stem).is_some_and(|dtype| dtype.starts_with('_')))
}

/// All entries of a kernel as its PTX names them.
pub fn entries(stem: &str) -> Option<Vec<&'static str>> {
    let text = ptx(stem)?;
    Some(
        text.lines()
            .filter_map(|line| line.trim().strip_prefix(".visible .entry "))
            .map(|rest| rest.trim_end_matches('('))
            .collect(),
    )
}

fn find(stem: &str) -> Option<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.stem == stem)
}

#[cfg(test)]
mod tests;
