//! Mutants of the PTX, each with the test that must find it.

use super::super::Mutant;

/// Instructions that fit a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    /// All of them are changed.
    All,
    /// The one of this number is changed.
    One(usize),
}

/// Instructions of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The entry.
    pub(super) entry: &'static str,
    /// The instructions among those that fit.
    pub(super) which: Which,
    /// The reason why no result can show the mutant, if none can.
    pub(super) unseen: Option<&'static str>,
}

/// A change of the instructions of one opcode in one entry, under a test of `every_entry`. An empty
/// text in place of an opcode removes the whole instruction.
pub(super) type PtxMutant = Mutant<Place, &'static str>;

const ADAM: &str = "fused_adam_f32";
const LARS_SUMS: &str = "lars_momentum_sums_f32";
const LARS: &str = "lars_momentum_update_f32";
const LAMB_SUMS: &str = "lamb_sums_f32";
const LAMB: &str = "lamb_update_f32";
const HALF: &str = "fused_adam_bf16_m32_s16";
const NORM: &str = "amp_norm_f32";
const FINISH: &str = "amp_finish";
const CHANGES: &str = "update_sums_f32";
const RANKS: &str = "rank_order_f32";
const FOLD: &str = "tensor_sums_fold";
const PLACE: &str = "tensor_sums_place";

const ADAM_ALONE: &str = "adam_alone_gives_the_bits_of_the_host";
const NORMS_ALONE: &str = "norms_alone_give_the_bits_of_the_host";
const CHANGES_ALONE: &str = "norms_of_updates_alone_have_the_bits_of_the_host";
const MANY_ALONE: &str = "a_norm_over_many_tensors_has_the_bits_of_the_host";
const LAST_BITS: &str = "norms_have_the_bits_of_the_host_to_the_last";
const HALVES_ALONE: &str = "adam_in_16_bits_alone_gives_the_bits_of_the_host";
const FOLD_ALONE: &str = "tensor_sums::chunks_are_folded_from_leaves_wherever_these_lie";
const PLACE_ALONE: &str = "tensor_sums::parts_are_updated_by_the_sums_that_the_device_adds_up";
const RANKS_ALONE: &str = "rank_order::sums_in_rank_order_are_those_of_the_host";

/// A mutant of the entry, under the test that launches it.
const fn mutant(
    name: &'static str,
    entry: &'static str,
    from: &'static str,
    to: &'static str,
    test: &'static str,
) -> PtxMutant {
    let place = Place { entry, which: Which::All, unseen: None };
    PtxMutant { name, place, from, to, finder: test }
}

const fn adam(name: &'static str, from: &'static str, to: &'static str) -> PtxMutant {
    mutant(name, ADAM, from, to, ADAM_ALONE)
}

const fn lars(name: &'static str, from: &'static str, to: &'static str) -> PtxMutant {
    mutant(name, LARS, from, to, NORMS_ALONE)
}

const fn lars_sums(name: &'static str, from: &'static str, to: &'static str) -> PtxMutant {
    mutant(name, LARS_SUMS, from, to, NORMS_ALONE)
}

/// A mutant that no result can show, for this reason.
const fn unseen(mutant: PtxMutant, why: &'static str) -> PtxMutant {
    PtxMutant { place: Place { unseen: Some(why), ..mutant.place }, ..mutant }
}

const fn barrier(entry: &'static str, test: &'static str) -> PtxMutant {
    mutant("one barrier of the block removed", entry, "bar.sync", "", test)
}

/// Changes of single instructions, one after the other.
pub(super) const EACH: [PtxMutant; 10] = [
    barrier(LARS_SUMS, NORMS_ALONE),
    barrier(LARS, NORMS_ALONE),
    barrier(LAMB_SUMS, NORMS_ALONE),
    barrier(LAMB, NORMS_ALONE),
    barrier(NORM, ADAM_ALONE),
    barrier(FINISH, MANY_ALONE),
    barrier(CHANGES, CHANGES_ALONE),
    adam("one end of a loop inverted", "setp.ge.u32", "setp.lt.u32"),
    adam("one start of a loop inverted", "setp.lt.u32", "setp.ge.u32"),
    adam("one question for a control block inverted", "setp.eq.s64", "setp.ne.s64"),
];

/// Changes of all instructions of an opcode together.
pub(super) const MUTANTS: [PtxMutant; 36] = [
    adam("products rounded to zero", "mul.rn.f32", "mul.rz.f32"),
    adam("sums rounded to zero", "add.rn.f32", "add.rz.f32"),
    adam("differences rounded up", "sub.rn.f32", "sub.rp.f32"),
    adam("quotients rounded down", "div.rn.f32", "div.rm.f32"),
    adam("roots rounded up", "sqrt.rn.f32", "sqrt.rp.f32"),
    adam("factors of gradients rounded to zero", "cvt.rn.f32.f64", "cvt.rz.f32.f64"),
    adam("sums for products", "mul.rn.f32", "add.rn.f32"),
    adam("packs stored by halves", "st.global.v4.f32", "st.global.v2.f32"),
    adam("packs loaded by halves", "ld.global.v4.f32", "ld.global.v2.f32"),
    adam("comparisons of counts inverted", "setp.le.u32", "setp.gt.u32"),
    adam("approximate quotients", "div.rn.f32", "div.approx.f32"),
    adam("offsets of 32 bits", "shl.b64", "shl.b32"),
    lars_sums("shared values stored as f32", "st.shared.f64", "st.shared.b32"),
    lars("packs stored by halves", "st.global.v4.f32", "st.global.v2.f32"),
    lars("packs loaded by halves", "ld.global.v4.f32", "ld.global.v2.f32"),
    lars("updates rounded to zero", "sub.rn.f32", "sub.rz.f32"),
    mutant("sums rounded to zero", LARS_SUMS, "add.rn.f64", "add.rz.f64", LAST_BITS),
    mutant("norms rounded down", LARS, "sqrt.rn.f64", "sqrt.rm.f64", LAST_BITS),
    mutant("rates rounded down", LARS, "div.rn.f64", "div.rm.f64", LAST_BITS),
    lars_sums("warps summed upwards", "shfl.sync.bfly", "shfl.sync.up"),
    unseen(
        lars_sums("warps summed downwards", "shfl.sync.bfly", "shfl.sync.down"),
        "only lane 0 of a warp keeps its sum, and what it takes at each halving are lanes below \
         the half, for which both modes name the same lane",
    ),
    mutant("quotients rounded up", LAMB, "div.rn.f32", "div.rp.f32", NORMS_ALONE),
    mutant("packs stored by halves", LAMB, "st.global.v4.f32", "st.global.v2.f32", NORMS_ALONE),
    mutant("sums rounded to zero", LAMB_SUMS, "add.rn.f64", "add.rz.f64", LAST_BITS),
    mutant("norms rounded down", LAMB, "sqrt.rn.f64", "sqrt.rm.f64", LAST_BITS),
    mutant("sums rounded up", NORM, "add.rn.f64", "add.rp.f64", ADAM_ALONE),
    mutant("chunks and tensors out of order", FINISH, "shfl.sync.bfly", "shfl.sync.up", MANY_ALONE),
    mutant("values added to those from before", CHANGES, "sub.rn.f64", "add.rn.f64", CHANGES_ALONE),
    mutant(
        "values loaded by halves",
        CHANGES,
        "ld.global.v4.f32",
        "ld.global.v2.f32",
        CHANGES_ALONE,
    ),
    mutant("masters stored by halves", HALF, "st.global.v4.f32", "st.global.v2.f32", HALVES_ALONE),
    mutant("ties rounded up", HALF, "and.b32", "or.b32", HALVES_ALONE),
    mutant("leaves out of order", FOLD, "shfl.sync.bfly", "shfl.sync.up", FOLD_ALONE),
    mutant("leaves behind the last added", FOLD, "setp.le.u64", "setp.lt.u64", FOLD_ALONE),
    mutant("chunks added down", PLACE, "add.rn.f64", "add.rm.f64", PLACE_ALONE),
    mutant("nothing behind the first sums", PLACE, "st.global.f64", "", PLACE_ALONE),
    mutant("ranks' sums rounded to zero", RANKS, "add.rn.f32", "add.rz.f32", RANKS_ALONE),
];
