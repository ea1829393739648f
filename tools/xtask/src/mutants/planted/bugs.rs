//! The bugs of ranks and of what they write, by what they break, and who finds each.

use super::{Planted, Tool};

/// In the order of what they break.
pub(super) const BUGS: &[Planted] = &[
    Planted {
        name: "collective: the last line of a reduction is nobody's",
        place: "crates/collective/src/sharing.rs",
        from: "numel: len_bytes.div_ceil(LINE_BYTES)",
        to: "numel: len_bytes / LINE_BYTES",
        finder: Tool::Test("fusestep-collective", "collective", "operations"),
    },
    Planted {
        name: "collective: what is left of a part after the first claims stays as it was",
        place: "crates/collective/src/sharing.rs",
        from: "end < part.len()",
        to: "end + self.claim_bytes < part.len()",
        finder: Tool::Test("fusestep-collective", "collective", "claims"),
    },
    Planted {
        name: "collective: the mean of two ranks is their sum",
        place: "crates/collective/src/rank_order.rs",
        from: "narrow::<T>(op, 2, result)",
        to: "narrow::<T>(op, 1, result)",
        finder: Tool::Test("fusestep-collective", "collective", "operations"),
    },
    Planted {
        name: "collective: ranks are summed from the last to the first",
        place: "crates/collective/src/rank_order.rs",
        from: r"for rank in 1..in_order {
        combine",
        to: r"for rank in (1..in_order).rev() {
        combine",
        finder: Tool::Test("fusestep-collective", "collective", "operations"),
    },
    Planted {
        name: "collective: the tree of four ranks is added in their order",
        place: "crates/collective/src/rank_order.rs",
        from: "world_size == 4 { 2 } else",
        to: "world_size == 4 { 4 } else",
        finder: Tool::Test("fusestep-collective", "lib", "one_sum_of_each_rank"),
    },
    Planted {
        name: "collective: a broadcast comes from rank 0",
        place: "crates/collective/src/movement.rs",
        from: r"Operation::Broadcast { root: from }
            | Operation::Scatter { root: from }",
        to: r"Operation::Broadcast { .. } => 0..1,
            Operation::Scatter { root: from }",
        finder: Tool::Test("fusestep-collective", "collective", "operations"),
    },
    Planted {
        name: "collective: an all-gather in place leaves the next rank's block out",
        place: "crates/collective/src/movement.rs",
        from: "take.from != rank || !keeps_own",
        to: "!keeps_own || (take.from != rank && take.from != rank + 1)",
        finder: Tool::Test("fusestep-collective", "collective", "operations"),
    },
    Planted {
        name: "collective: the longer blocks are not the first ones",
        place: "crates/collective/src/blocks.rs",
        from: "rank * each + rank.min(more)",
        to: "rank * each",
        finder: Tool::Test("fusestep-collective", "collective", "operations"),
    },
    Planted {
        name: "collective: calls that differ are not compared",
        place: "crates/collective/src/thread/algorithms.rs",
        from: r"Fingerprint::compare(world_size, |rank| &peers.header(rank).fingerprint)?;
",
        to: "",
        finder: Tool::Test("fusestep-collective", "collective", "mismatches"),
    },
    Planted {
        name: "collective: the straggler is the first to come",
        place: "crates/collective/src/thread/algorithms.rs",
        from: "(0..world_size).max_by_key(|&rank| arrived(rank))",
        to: "(0..world_size).min_by_key(|&rank| arrived(rank))",
        finder: Tool::Test("fusestep-collective", "collective", "straggler"),
    },
    Planted {
        name: "collective: a message in place is overwritten before it is read",
        place: "crates/collective/src/movement.rs",
        from: "Cow::Owned(buffer.to_vec())",
        to: "Cow::Owned(vec![0; buffer.len()])",
        finder: Tool::Test("fusestep-collective", "collective", "operations"),
    },
    Planted {
        name: "collective: a piece is read where another rank's lies on the stage",
        place: "crates/collective-processes/src/reduction.rs",
        from: "pieces.slot(party, self.rank)",
        to: "pieces.slot(self.rank, party)",
        finder: Tool::Test("fusestep-collective-processes", "processes", "on_3_ranks"),
    },
    Planted {
        name: "ranks: other hyper-parameters are not noticed",
        place: "crates/planner/src/run/comms/handshake.rs",
        from: "add(&of(&name), value);",
        to: "let _ = (name, value);",
        finder: Tool::Test("fusestep-tests", "distributed", "handshake"),
    },
    Planted {
        name: "ranks: parts of a bucket are of ranks that have enough",
        place: "crates/planner/src/plan/passes/buckets.rs",
        from: "sum += wanted;",
        to: "sum += wanted / 2;",
        finder: Tool::Test("fusestep-tests", "distributed", "plans"),
    },
    Planted {
        name: "ranks: the last part of a bucket ends early",
        place: "crates/planner/src/plan/passes/buckets.rs",
        from: r"bucket.elements.end
            } else {
                snap(",
        to: r"bucket.elements.end - 1
            } else {
                snap(",
        finder: Tool::Fuzz("plan"),
    },
    Planted {
        name: "ranks: averages come a step late",
        place: "crates/planner/src/run/stages/average.rs",
        from: "run.state.since_average += 1;",
        to: "run.state.since_average += u64::from(run.state.step() > 1);",
        finder: Tool::Test("fusestep-tests", "distributed", "averages"),
    },
    Planted {
        name: "save: the manifest is taken for durable while its files' folder is not",
        place: "crates/tensor-file/src/prepared.rs",
        from: r#"// The rename itself is only durable once the folder is.
        self.files
            .sync_folder(&place::folder(&self.target))
            .map_err(io_error(&self.path, "sync its folder"))"#,
        to: "Ok(())",
        finder: Tool::Simulate,
    },
    Planted {
        name: "save: folders that are made are not durable",
        place: "crates/checkpoint/src/generation.rs",
        from: r"        sync(folder, or_this(above))?;
",
        to: r"        let _ = or_this(above);
",
        finder: Tool::Test("fusestep-tests", "trust", "first_save_is_there"),
    },
    Planted {
        name: "save: a manifest is built upon that a loss of power takes back",
        place: "crates/checkpoint/src/generation.rs",
        from: r"            sync(folder, folder.path)?;
",
        to: "",
        finder: Tool::Test("fusestep-tests", "trust", "saves_of_one_step"),
    },
    Planted {
        name: "save: a mark may go before its shards",
        place: "crates/checkpoint/src/generation.rs",
        from: r" && sync(folder, &path).is_ok()",
        to: "",
        finder: Tool::Test("fusestep-tests", "trust", "saves_of_one_step"),
    },
    Planted {
        name: "save: the old generation goes before the new one counts",
        place: "crates/checkpoint/src/commits.rs",
        from: r"    Prepared::bytes_in(folder.files, &path, &text)?.commit()?;
    let counts = Some(manifest.generation.as_str());
    generation::remove_but(folder, &manifest.checkpoint, counts, previous.as_ref());",
        to: r"    let counts = Some(manifest.generation.as_str());
    generation::remove_but(folder, &manifest.checkpoint, counts, previous.as_ref());
    Prepared::bytes_in(folder.files, &path, &text)?.commit()?;",
        finder: Tool::Simulate,
    },
    Planted {
        name: "save: the generation before stays for ever",
        place: "crates/checkpoint/src/commits.rs",
        from: r"    generation::remove_but(folder, &manifest.checkpoint, counts, previous.as_ref());
",
        to: r"    let _ = (generation::remove_but, counts);
    drop(previous);
",
        finder: Tool::Simulate,
    },
    Planted {
        name: "save: a second save of a step writes over the first",
        place: "crates/checkpoint/src/generation.rs",
        from: "if counts == Some(name.as_str()) || !found",
        to: "if !found",
        finder: Tool::Test("fusestep-tests", "distributed", "saving_twice"),
    },
    Planted {
        name: "save: folders of other checkpoints are taken",
        place: "crates/checkpoint/src/generation.rs",
        from: "Some(mark) => mark.checkpoint == begun.checkpoint && begun.has(&self.name()),",
        to: "Some(_) => true,",
        finder: Tool::Test("fusestep-tests", "trust", "nothing_of_others"),
    },
    Planted {
        name: "save: generations that were not begun here are removed",
        place: "crates/checkpoint/src/generation.rs",
        from: "let mut names = begun.there(folder);",
        to: "let mut names = folder.files.list(folder.path).unwrap_or_default();",
        finder: Tool::Test("fusestep-tests", "trust", "a_generation_of_a_copy"),
    },
    Planted {
        name: "save: other ranks' files are not looked for",
        place: "crates/checkpoint/src/commits.rs",
        from: "let seen = manifest.check_shards_seen(folder);",
        to: "let seen: Result<(), PlanError> = Ok(());",
        finder: Tool::Test("fusestep-tests", "trust", "rank_0_does_not_see"),
    },
    Planted {
        name: "save: an error of another rank is no error",
        place: "crates/checkpoint/src/agree.rs",
        from: r"on_outcome(comms, written.map(drop))?;
    let said",
        to: r"let _ = on_outcome(comms, written.map(drop));
    let said",
        finder: Tool::Simulate,
    },
    Planted {
        name: "save behind: parts go on before all ranks have done theirs",
        place: "crates/checkpoint/src/saves.rs",
        from: "own.flight.is_busy(comms, own.outcome.is_none())",
        to: "own.flight.is_busy(comms, false)",
        finder: Tool::Simulate,
    },
    Planted {
        name: "save behind: a save counts before its manifest is written",
        place: "crates/checkpoint/src/saves.rs",
        from: r"                self.flight = Some(own);
                Ok(None)
",
        to: r"                let step = own.flight.step;
                let said = (own.flight.phase == crate::flight::Phase::Commit).then_some(Saved { step });
                self.flight = Some(own);
                Ok(said)
",
        finder: Tool::Simulate,
    },
    Planted {
        name: "save behind: nobody hears of an error of the last part",
        place: "crates/checkpoint/src/flight.rs",
        from: "agree::on_outcome(comms, outcome.map(drop))?;",
        to: "let _ = agree::on_outcome(comms, outcome.map(drop));",
        finder: Tool::Test("fusestep-tests", "distributed", "an_error_behind"),
    },
    Planted {
        name: "save behind: what was copied for the save before is written again",
        place: "crates/planner/src/run/image/take.rs",
        from: "*self = Self { bytes, ..Self::describe(run.plan, run.state)? };",
        to: r"if !bytes.is_empty() {
            self.bytes = bytes;
            return Ok(());
        }
        *self = Self { bytes, ..Self::describe(run.plan, run.state)? };",
        finder: Tool::Test("fusestep-tests", "distributed", "the_checkpoint_before_counts"),
    },
    Planted {
        name: "save: skipped steps are not saved",
        place: "crates/checkpoint/src/flight.rs",
        from: "skipped: counts.skipped,",
        to: "skipped: 0,",
        finder: Tool::Test("fusestep-tests", "trust", "counts"),
    },
    Planted {
        name: "save: steps that a parameter has missed are not saved",
        place: "crates/checkpoint/src/flight.rs",
        from: "differs.then(|| (param.name.clone(), step))",
        to: "differs.then(|| (param.name.clone(), counts.step))",
        finder: Tool::Test("fusestep-tests", "distributed", "goes_on"),
    },
    Planted {
        name: "save: gradients of a micro-step under way are lost silently",
        place: "crates/planner/src/run/image/take.rs",
        from: "if state.arena.now.iter().all(|given| *given == Given::No) {",
        to: "if state.arena.now.iter().all(|given| *given == Given::No) || true {",
        finder: Tool::Test("fusestep-tests", "trust", "counts"),
    },
    Planted {
        name: "save: counts that no reader takes are saved",
        place: "crates/planner/src/run/memory/state.rs",
        from: "if found > MAX_STEPS {",
        to: "if found > 2 * MAX_STEPS {",
        finder: Tool::Test("fusestep-tests", "trust", "counts"),
    },
    Planted {
        name: "commit: two files without a journal",
        place: "crates/tensor-file/src/commit.rs",
        from: ".and_then(|()| put_journal(files, &journal, Journal::new(moves.clone())));",
        to: ";",
        finder: Tool::Faults,
    },
    Planted {
        name: "commit: after an error the first file is new",
        place: "crates/tensor-file/src/commit.rs",
        from: "let old = keep_old(files, &prepared);",
        to: "let old: Vec<Old> = prepared.iter().map(|_| Old::Nothing).collect();",
        finder: Tool::Test("fusestep-tests", "trust", "an_error_anywhere"),
    },
    Planted {
        name: "commit: the journal is durable before what it names",
        place: "crates/tensor-file/src/commit.rs",
        from: r"    sync_folders(files, prepared.iter().map(|file| file.target.as_path()))?;
    Ok(moves)",
        to: "    Ok(moves)",
        finder: Tool::Test("fusestep-tests", "trust", "loss_of_power"),
    },
    Planted {
        name: "commit: a damaged journal moves files",
        place: "crates/tensor-file/src/journal.rs",
        from: "journal.format == FORMAT && journal.xxh3 == sum_of(&journal.moves)",
        to: "journal.format == FORMAT",
        finder: Tool::Test("fusestep-tests", "trust", "right_moves_under"),
    },
    Planted {
        name: "commit: an interrupted commit is not finished",
        place: "crates/tensor-file/src/finish.rs",
        from: r#"files.rename(&step.from, &step.to).map_err(io_error(&told, "replace"))?;"#,
        to: "let _ = told;",
        finder: Tool::Test("fusestep-tests", "trust", "loss_of_power"),
    },
    Planted {
        name: "commit: a writer that lives is taken for a dead one",
        place: "crates/tensor-file/src/claim.rs",
        from: "Ok(lock) => locks.push(lock),",
        to: "Ok(lock) => drop(lock),",
        finder: Tool::Simulate,
    },
    Planted {
        name: "commit: a journal is replayed over a later write",
        place: "crates/tensor-file/src/finish.rs",
        from: "Some(old) if !old.sum.is_of(files, &step.to, &look) => Found::Changed,",
        to: "Some(old) if !old.sum.is_of(files, &step.to, &look) => Found::Old,",
        finder: Tool::Simulate,
    },
    Planted {
        name: "commit: a step on the second file does not see the journal",
        place: "crates/tensor-file/src/commit.rs",
        from: "put_new(files, &pointer, &text)?;",
        to: "let _ = (&pointer, &text);",
        finder: Tool::Simulate,
    },
    Planted {
        name: "commit: what another program has written meanwhile is replaced",
        place: "crates/tensor-file/src/commit.rs",
        from: "if Some(look(claim.files(), &file.target)?) == claim.before(&file.target) {",
        to: "if look(claim.files(), &file.target).is_ok() {",
        finder: Tool::Simulate,
    },
    Planted {
        name: "lanes: a sum is added twice to the lane that completes it",
        place: "crates/planner/src/run/memory/absorb.rs",
        from: "*sum = left.plus(*sum);",
        to: "*sum = left.plus(left.plus(*sum));",
        finder: Tool::Test("fusestep-tests", "distributed", "lanes"),
    },
    Planted {
        name: "lanes: the tree is cut in the middle",
        place: "crates/planner/src/plan/lanes.rs",
        from: "self.first + lanes.next_power_of_two() / 2",
        to: "self.first + lanes / 2",
        finder: Tool::Test("fusestep-tests", "distributed", "lanes"),
    },
    Planted {
        name: "lanes: the mean divides by the micro-batches of one rank",
        place: "crates/planner/src/run/memory/lanes.rs",
        from: "=> Divisor::of(total)",
        to: "=> Divisor::of(total / plan.topology.world as f64)",
        finder: Tool::Test("fusestep-tests", "distributed", "lanes"),
    },
    Planted {
        name: "lanes: a short window divides by all of its micro-batches",
        place: "crates/planner/src/run/memory/lanes.rs",
        from: "        self.micro_batches = micro_batches;",
        to: "        let _ = micro_batches;",
        finder: Tool::Test("fusestep-tests", "distributed", "lanes"),
    },
    Planted {
        name: "lanes: a sum over ranks takes its first neighbour for the nearest",
        place: "crates/collective/src/rank_order/tree.rs",
        from: "add_to(&held[depth], &mut sum);",
        to: "add_to(&held[0], &mut sum);",
        finder: Tool::Test("fusestep-collective", "collective", "trees"),
    },
    Planted {
        name: "lanes: an update sees the first sum of each rank alone",
        place: "crates/planner/src/run/stages/reduce_update.rs",
        from: "slot => further[slot - 1][sum.rank],",
        to: "_ => grads[sum.rank],",
        finder: Tool::Test("fusestep-tests", "distributed", "lanes"),
    },
];
