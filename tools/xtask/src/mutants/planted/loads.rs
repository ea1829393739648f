//! The bugs of what is read and of what is handed to devices, by what they break, and who finds
//! each.

use super::{Planted, Tool};

/// In the order of what they break.
pub(super) const LOADS: &[Planted] = &[
    Planted {
        name: "resume: ranks go on from different checkpoints",
        place: "crates/planner/src/checkpoint/checkpoints.rs",
        from: "read, said)?;",
        to: "read, said.min(1).max(1))?;",
        finder: Tool::Test("fusestep-tests", "distributed", "or_none_of_them_does"),
    },
    Planted {
        name: "resume: a manifest that cannot be read is taken for none",
        place: "crates/planner/src/checkpoint/place.rs",
        from: "Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),",
        to: "Err(error) if error.kind() != ErrorKind::InvalidData => Ok(None),",
        finder: Tool::Simulate,
    },
    Planted {
        name: "resume: counts are not restored",
        place: "crates/planner/src/checkpoint/save.rs",
        from: r"progress::restore_counts(plan, state, backend, &run.progress)?;
",
        to: "",
        finder: Tool::Simulate,
    },
    Planted {
        name: "resume: a window that is open is forgotten",
        place: "crates/planner/src/checkpoint/save.rs",
        from: "progress::restore_open(plan, state, backend, &run.progress",
        to: "let _ = (&run.progress, run.from, &run.tensors);
    #[cfg(any())]
    progress::restore_open(plan, state, backend, &run.progress",
        finder: Tool::Simulate,
    },
    Planted {
        name: "resume: state is not restored",
        place: "crates/planner/src/checkpoint/save.rs",
        from: "None => state.write_all(backend, role, &desc.name, bytes)?,",
        to: r"None if role == Role::Param => state.write_all(backend, role, &desc.name, bytes)?,
                    None => {}",
        finder: Tool::Simulate,
    },
    Planted {
        name: "resume: a reader beside a saver gives up at once",
        place: "crates/planner/src/checkpoint/shards.rs",
        from: "for _ in 0..MOST_TRIES {",
        to: "for _ in 0..MOST_TRIES - 100 {",
        finder: Tool::Test("fusestep-tests", "trust", "begins_again"),
    },
    Planted {
        name: "load: ranges that overlap count",
        place: "crates/planner/src/checkpoint/shards.rs",
        from: "if first != covered {",
        to: "if first > covered {",
        finder: Tool::Test("fusestep-planner", "lib", "covered"),
    },
    Planted {
        name: "load: a hole at the end counts",
        place: "crates/planner/src/checkpoint/shards.rs",
        from: "if covered == numel {",
        to: "if covered <= numel {",
        finder: Tool::Test("fusestep-tests", "trust", "overlapping"),
    },
    Planted {
        name: "load: a shard's checksum is not compared",
        place: "crates/planner/src/checkpoint/shard_file.rs",
        from: "if found == spec.xxh3 {",
        to: "if found == spec.xxh3 || !found.is_empty() {",
        finder: Tool::Simulate,
    },
    Planted {
        name: "load: a manifest may ask for any memory",
        place: "crates/planner/src/checkpoint/shards.rs",
        from: "if needed.is_some_and(|needed| needed <= on_disk) {",
        to: "if needed.is_none_or(|needed| needed <= on_disk) || true {",
        finder: Tool::Test("fusestep-tests", "distributed", "more_memory"),
    },
    Planted {
        name: "load: a manifest's checksum is not compared",
        place: "crates/planner/src/checkpoint/manifest.rs",
        from: "if found != self.xxh3 {",
        to: "if found.is_empty() {",
        finder: Tool::Test("fusestep-cli", "cli", "edited_manifests"),
    },
    Planted {
        name: "load: names in a manifest lead anywhere",
        place: "crates/planner/src/checkpoint/manifest.rs",
        from: r"has_length && !name.contains(['/', '\\']) && !name.starts_with('.')",
        to: "has_length",
        finder: Tool::Test("fusestep-tests", "distributed", "without_a_checksum"),
    },
    Planted {
        name: "load: state of another rule is taken",
        place: "crates/planner/src/checkpoint/file.rs",
        from: "if expected == found || (found.is_none() && may_lack) {",
        to: "if expected == found || found.is_some() || may_lack {",
        finder: Tool::Test("fusestep-tests", "trust", "another_rule"),
    },
    Planted {
        name: "load: a tensor's checksum is not compared",
        place: "crates/planner/src/checkpoint/file_sums.rs",
        from: r"let (expected, found) = (text_of(file, &sum_key(&name))?, checksum(bytes));
        if expected != found {",
        to: r"let (expected, found) = (text_of(file, &sum_key(&name))?, checksum(bytes));
        if found.is_empty() {",
        finder: Tool::Test("fusestep-tests", "trust", "every_flipped_bit"),
    },
    Planted {
        name: "load: what is refused has changed the state already",
        place: "crates/planner/src/checkpoint/file.rs",
        from: r"let steps = check(state, &file)?;
",
        to: r"for param in state.params.clone().iter() {
        for role in state_roles(state, param)? {
            let bytes = file.bytes(&tensor_name(param, role)).unwrap_or_default();
            state.write(backend, role, &param.name, bytes)?;
        }
    }
    let steps = check(state, &file)?;
",
        finder: Tool::Fuzz("state"),
    },
    Planted {
        name: "load: state may be negative where squares are added up",
        place: "crates/planner/src/checkpoint/values.rs",
        from: "|| (negative && *value < 0.0)",
        to: "|| (negative && value.is_nan())",
        finder: Tool::Test("fusestep-tests", "trust", "impossible_values"),
    },
    Planted {
        name: "load: steps without a limit",
        place: "crates/planner/src/checkpoint/file.rs",
        from: "text.parse().ok().filter(|&count| count <= MAX_STEPS)",
        to: "text.parse().ok().filter(|&count| count <= u64::MAX)",
        finder: Tool::Test("fusestep-tests", "trust", "changed_counts"),
    },
    Planted {
        name: "load: descriptions of any length",
        place: "crates/tensor-file/src/header.rs",
        from: "*length > MAX_ENTRY_BYTES",
        to: "*length > usize::MAX - 1",
        finder: Tool::Test("fusestep-tensor-file", "lib", "descriptions_are_bounded"),
    },
    Planted {
        name: "load: names are printed as they are",
        place: "crates/tensor/src/quoted.rs",
        from: "c.is_control() || direction ||",
        to: "direction ||",
        finder: Tool::Test("fusestep-cli", "cli", "names_are_quoted"),
    },
    Planted {
        name: "packing: a launch takes a record more than fits",
        place: "crates/launch/src/batch.rs",
        from: r"bytes <= self.limits.argument_bytes
",
        to: r"bytes <= self.limits.argument_bytes + 24
",
        finder: Tool::Fuzz("packing"),
    },
    Planted {
        name: "packing: a new launch knows the groups of the one before",
        place: "crates/launch/src/batch.rs",
        from: r"        self.groups.clear();
",
        to: "",
        finder: Tool::Fuzz("packing"),
    },
    Planted {
        name: "packing: chunks are counted from the tensor's start",
        place: "crates/launch/src/batch.rs",
        from: "first_chunk: self.batch.chunks,",
        to: "first_chunk: 0,",
        finder: Tool::Test("fusestep-launch", "lib", "batch"),
    },
    Planted {
        name: "packing: a last launch of one tensor is lost",
        place: "crates/launch/src/batch.rs",
        from: "if !self.batch.records.is_empty() {",
        to: "if self.batch.records.len() > 1 {",
        finder: Tool::Test("fusestep-launch", "lib", "batch"),
    },
    Planted {
        name: "packing: a launch has a chunk too many",
        place: "crates/launch/src/batch.rs",
        from: ".min(chunks_left);",
        to: ".min(chunks_left + 1);",
        finder: Tool::Test("fusestep-launch", "lib", "batch"),
    },
    Planted {
        name: "packing: tensors overlap where slots are padded",
        place: "crates/coalesce/src/layout.rs",
        from: r".checked_next_multiple_of(slot)
",
        to: r".checked_next_multiple_of(slot.min(1))
",
        finder: Tool::Test("fusestep-tests", "coalesce", ""),
    },
];
