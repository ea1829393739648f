//! The bugs of what is read and of what is handed to devices, by what they break, and who finds
//! each.

use super::{Planted, Tool};

/// In the order of what they break.
pub(super) const LOADS: &[Planted] = &[
    Planted {
        name: "resume: ranks go on from different checkpoints",
        place: "crates/checkpoint/src/checkpoints.rs",
        from: "read, said)?;",
        to: "read, said.min(1).max(1))?;",
        finder: Tool::Test("fusestep-tests", "distributed", "or_none_of_them_does"),
    },
    Planted {
        name: "resume: a manifest that cannot be read is taken for none",
        place: "crates/checkpoint/src/place.rs",
        from: "Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),",
        to: "Err(error) if error.kind() != ErrorKind::InvalidData => Ok(None),",
        finder: Tool::Simulate,
    },
    Planted {
        name: "resume: counts are not restored",
        place: "crates/planner/src/run/image/restore.rs",
        from: r"restore_counts(state, backend, counts)?;
",
        to: "let _ = restore_counts;",
        finder: Tool::Simulate,
    },
    Planted {
        name: "resume: a window that is open is forgotten",
        place: "crates/planner/src/run/image/restore.rs",
        from: "restore_place(state, counts);",
        to: "let _ = restore_place;",
        finder: Tool::Simulate,
    },
    Planted {
        name: "resume: state is not restored",
        place: "crates/planner/src/run/image/restore.rs",
        from: "None => state.write_all(backend, list.role, &desc.name, bytes)?,",
        to: r"None if list.role == Role::Param => {
                        state.write_all(backend, list.role, &desc.name, bytes)?;
                    }
                    None => {}",
        finder: Tool::Simulate,
    },
    Planted {
        name: "resume: a reader beside a saver gives up at once",
        place: "crates/checkpoint/src/shards.rs",
        from: "for _ in 0..MOST_TRIES {",
        to: "for _ in 0..MOST_TRIES - 100 {",
        finder: Tool::Test("fusestep-tests", "trust", "begins_again"),
    },
    Planted {
        name: "load: ranges that overlap count",
        place: "crates/checkpoint/src/shards.rs",
        from: "if first != covered {",
        to: "if first > covered {",
        finder: Tool::Test("fusestep-checkpoint", "lib", "covered"),
    },
    Planted {
        name: "load: a hole at the end counts",
        place: "crates/checkpoint/src/shards.rs",
        from: "if covered == numel {",
        to: "if covered <= numel {",
        finder: Tool::Test("fusestep-tests", "trust", "overlapping"),
    },
    Planted {
        name: "load: a shard's checksum is not compared",
        place: "crates/checkpoint/src/shard_file.rs",
        from: "if found == spec.xxh3 {",
        to: "if found == spec.xxh3 || !found.is_empty() {",
        finder: Tool::Simulate,
    },
    Planted {
        name: "load: a manifest may ask for any memory",
        place: "crates/checkpoint/src/shards.rs",
        from: "if needed.is_some_and(|needed| needed <= on_disk) {",
        to: "if needed.is_none_or(|needed| needed <= on_disk) || true {",
        finder: Tool::Test("fusestep-tests", "distributed", "more_memory"),
    },
    Planted {
        name: "load: a manifest's checksum is not compared",
        place: "crates/checkpoint/src/manifest.rs",
        from: "if found != self.xxh3 {",
        to: "if found.is_empty() {",
        finder: Tool::Test("fusestep-cli", "cli", "edited_manifests"),
    },
    Planted {
        name: "load: names in a manifest lead anywhere",
        place: "crates/checkpoint/src/manifest.rs",
        from: r"has_length && !name.contains(['/', '\\']) && !name.starts_with('.')",
        to: "has_length",
        finder: Tool::Test("fusestep-tests", "distributed", "without_a_checksum"),
    },
    Planted {
        name: "load: state of another rule is taken",
        place: "crates/checkpoint/src/state_file.rs",
        from: "if expected == found || (found.is_none() && may_lack) {",
        to: "if expected == found || found.is_some() || may_lack {",
        finder: Tool::Test("fusestep-tests", "trust", "another_rule"),
    },
    Planted {
        name: "load: a tensor's checksum is not compared",
        place: "crates/checkpoint/src/state_sums.rs",
        from: r"let (expected, found) = (text_of(file, &sum_key(name))?, checksum(bytes));
        if expected != found {",
        to: r"let (expected, found) = (text_of(file, &sum_key(name))?, checksum(bytes));
        if found.is_empty() {",
        finder: Tool::Test("fusestep-tests", "trust", "every_flipped_bit"),
    },
    Planted {
        name: "load: what is refused has changed the state already",
        place: "crates/checkpoint/src/state_file.rs",
        from: r"let mut counts = check(&image, &file)?;
",
        to: r"for param in &image.params {
        for list in &param.lists {
            let bytes = file.bytes(&tensor_name(&param.name, list.role)).unwrap_or_default();
            state.write(backend, list.role, &param.name, bytes)?;
        }
    }
    let mut counts = check(&image, &file)?;
",
        finder: Tool::Fuzz("state"),
    },
    Planted {
        name: "load: state may be negative where squares are added up",
        place: "crates/checkpoint/src/values.rs",
        from: "|| (negative && *value < 0.0)",
        to: "|| (negative && value.is_nan())",
        finder: Tool::Test("fusestep-tests", "trust", "impossible_values"),
    },
    Planted {
        name: "load: steps without a limit",
        place: "crates/checkpoint/src/state_file.rs",
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
