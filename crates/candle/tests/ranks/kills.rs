//! A run that saves behind training after every step, killed within saves and gone on with.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use candle_core::{DType, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fusestep_candle::{AdamW, Fused, Options};
use fusestep_checkpoint::Manifest;

use super::{all_bits, exact, on_ranks, tensor};

/// Name and shape of each variable: three layers, with a state that takes a disk some time.
const LAYERS: [(&str, &[usize]); 3] =
    [("first", &[32, 384]), ("second", &[384, 384]), ("third", &[384, 8])];
/// Samples of a step, of all ranks together.
const BATCH: usize = 8;
/// Kills after which the run is given up. On a busy machine most of them miss a save; on an idle
/// one every other.
const MOST_KILLS: usize = 300;
/// Steps of the run that is not killed any more.
const LAST_STEPS: usize = 3;

/// What the program that is killed reads from its environment.
const FOLDER: &str = "FUSESTEP_KILLS_FOLDER";
const RANKS: &str = "FUSESTEP_KILLS_RANKS";
const STEPS: &str = "FUSESTEP_KILLS_STEPS";
/// What its lines begin with.
const MARK: &str = "kills:";

/// What a run tells, each with the steps done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Resumed,
    Stepped,
    /// A save of that many steps is under way, and the one before is complete.
    Begun,
    Ended,
}

/// Hears what is told, the steps done and the variables.
type Listener<'a> = dyn Fn(Told, usize, &[(String, Var)]) + Sync + 'a;

/// The loss of a rank's part of a step's batch, which depends on the step alone.
fn loss(vars: &[(String, Var)], step: usize, part: (usize, usize)) -> candle_core::Result<Tensor> {
    let (rank, world) = part;
    let own = BATCH / world;
    let of = |what, width: usize| {
        tensor(&[own, width], DType::F32, |at| {
            exact([what, step as u64, (rank * own * width) as u64 + at])
        })
    };
    let mut hidden = of(1, LAYERS[0].1[0]);
    for (_, var) in vars {
        hidden = hidden.matmul(var.as_tensor())?.tanh()?;
    }
    (hidden - of(2, LAYERS[2].1[1]))?.sqr()?.mean_all()
}

/// Trains so many steps more: from the folder's checkpoint on, with a save behind after each, or
/// from the start without any.
fn go_on(
    run: &mut Fused<'_, ParamsAdamW>,
    vars: &[(String, Var)],
    part: (usize, usize),
    (folder, steps): (Option<&Path>, usize),
    tell: &dyn Fn(Told, usize),
) {
    let resumed = folder.map_or(Ok(0), |folder| run.resume(folder));
    let first = resumed.unwrap();
    tell(Told::Resumed, first);
    let end = first.saturating_add(steps);
    for step in first..end {
        run.backward_step(&loss(vars, step, part).unwrap()).unwrap();
        tell(Told::Stepped, step + 1);
        if let Some(folder) = folder {
            assert!(run.checkpoint_every(1, folder, step).unwrap());
            tell(Told::Begun, step + 1);
        }
    }
    run.finish_saves().unwrap();
    tell(Told::Ended, end);
}

/// Trains on so many ranks, the first of which tells, each time with a hash of all bits of the
/// variables.
fn train(world: usize, (folder, steps): (Option<&Path>, usize), tell: &Listener<'_>) {
    let start = || -> (Vec<(String, Var)>, AdamW) {
        let var = |(index, (name, shape)): (usize, &(&str, &[usize]))| {
            let first = tensor(shape, DType::F32, |at| exact([5, index as u64, at]) / 8.0);
            ((*name).to_owned(), Var::from_tensor(&first).unwrap())
        };
        let vars: Vec<_> = LAYERS.iter().enumerate().map(var).collect();
        let options = Options { zero: if world == 1 { 0 } else { 2 }, ..Options::default() };
        let optimizer = AdamW::with_options(vars.clone(), ParamsAdamW::default(), &options);
        (vars, optimizer.unwrap())
    };
    if world == 1 {
        let (vars, mut fused) = start();
        let tell = |told, steps| tell(told, steps, &vars);
        go_on(&mut fused, &vars, (0, 1), (folder, steps), &tell);
        return;
    }
    on_ranks(world, |comm| {
        let (vars, fused) = start();
        let rank = comm.rank();
        let tell = |told, steps| {
            if rank == 0 {
                tell(told, steps, &vars);
            }
        };
        let mut ranked = fused.on(comm).unwrap();
        go_on(&mut ranked, &vars, (rank, world), (folder, steps), &tell);
    });
}

fn hash(vars: &[(String, Var)]) -> u64 {
    let mut hasher = DefaultHasher::new();
    all_bits(vars).hash(&mut hasher);
    hasher.finish()
}

#[test]
#[ignore = "the program that the tests below start and kill"]
fn program() {
    let of = |name: &str| std::env::var(name).ok();
    let (Some(folder), Some(ranks), Some(steps)) = (of(FOLDER), of(RANKS), of(STEPS)) else {
        return;
    };
    let of = (Some(Path::new(&folder)), steps.parse().unwrap());
    train(ranks.parse().unwrap(), of, &|told, steps, vars| {
        // Hashes take longer than a step, which would leave less of the time to saves.
        let hash = match told {
            Told::Stepped => return,
            Told::Begun => 0,
            Told::Resumed | Told::Ended => hash(vars),
        };
        // In one write, which a pipe takes whole or not at all: a kill must not tear the line.
        // Standard output has the harness's own text in front.
        let line = format!("{MARK} {told:?} {steps} {hash}\n");
        std::io::stderr().write_all(line.as_bytes()).unwrap();
    });
}

/// A program that trains, killed where the test ends early.
struct Program {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStderr>>,
    /// What it has written that is not meant for the test: why it has panicked, say.
    said: String,
}

impl Program {
    fn start(world: usize, folder: &Path, steps: usize) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "kills::program", "--ignored", "--nocapture"])
            .env(FOLDER, folder)
            .env(RANKS, world.to_string())
            .env(STEPS, steps.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, lines, said: String::new() }
    }

    /// What it tells next, with the steps done and the hash; nothing at its end.
    fn next(&mut self) -> Option<(Told, usize, u64)> {
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            let Some(told) = line.strip_prefix(MARK) else {
                self.said += &line;
                self.said.push('\n');
                continue;
            };
            let words: Vec<&str> = told.split_whitespace().collect();
            let all = [Told::Resumed, Told::Begun, Told::Ended];
            let mut all = all.into_iter();
            let told = all.find(|told| format!("{told:?}") == words[0]).unwrap();
            return Some((told, words[1].parse().unwrap(), words[2].parse().unwrap()));
        }
        None
    }

    /// The next steps done and hash, which are of this kind.
    fn expect(&mut self, kind: Told) -> (usize, u64) {
        match self.next() {
            Some((told, steps, hash)) if told == kind => (steps, hash),
            other => panic!("expected {kind:?}, found {other:?}: {}", self.said),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Ended already, it is not there to be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a save of so many steps has left files in the folder, and does not count.
fn is_cut_off(folder: &Path, steps: usize) -> bool {
    let save = format!("step-{steps:08}-");
    let counts = Manifest::read(folder).unwrap().generation;
    let mut names = fs::read_dir(folder).unwrap();
    let begun = names.any(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.starts_with(&save)
    });
    begun && !counts.starts_with(&save)
}

/// Kills a run until that many kills have cut off a save, and lets it end then.
fn kill_within_saves(world: usize, wanted: usize) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (mut kills, mut cut_off) = (0, 0);
    // What has last been acknowledged, begun, and what each start has gone on from.
    let (mut acknowledged, mut begun) = (0, 0);
    let mut resumed: Vec<(usize, u64)> = Vec::new();
    while cut_off < wanted {
        assert!(
            kills < MOST_KILLS,
            "expected {wanted} of {MOST_KILLS} kills to cut off a save, found {cut_off}"
        );
        let mut program = Program::start(world, folder, usize::MAX);
        let (first, hash) = program.expect(Told::Resumed);
        assert!(
            (acknowledged..=begun + 1).contains(&first),
            "kill {kills}: expected to go on from step {acknowledged} to {}, found {first}",
            begun + 1
        );
        resumed.push((first, hash));
        // A save is begun as soon as the one before is complete: between two lines is one save.
        (begun, _) = program.expect(Told::Begun);
        let start = Instant::now();
        let saves = 1 + kills as u32 % 3;
        for _ in 0..saves {
            (begun, _) = program.expect(Told::Begun);
        }
        // The second half of a save's time goes to removing the one before, when it counts already:
        // squares leave that to one kill in four or so.
        let share = exact([3, world as u64, kills as u64]) + 0.5;
        let pause: Duration = (start.elapsed() / saves).mul_f32(share * share);
        std::thread::sleep(pause);
        // SIGKILL: nothing of the process runs after it.
        program.child.kill().unwrap();
        while let Some((told, steps, _)) = program.next() {
            assert_eq!(told, Told::Begun);
            begun = steps;
        }
        assert!(!program.child.wait().unwrap().success());
        acknowledged = begun - 1;
        kills += 1;
        cut_off += usize::from(is_cut_off(folder, begun));
    }
    let mut program = Program::start(world, folder, LAST_STEPS);
    resumed.push(program.expect(Told::Resumed));
    let (last, _) = resumed[kills];
    assert!((acknowledged..=begun + 1).contains(&last), "{last}");
    while let Some((told, steps, hash)) = program.next() {
        if told == Told::Ended {
            resumed.push((steps, hash));
        }
    }
    assert!(program.child.wait().unwrap().success(), "{}", program.said);
    assert_eq!(resumed.len(), kills + 2);
    println!("{world} ranks: {kills} kills, {cut_off} within a save, {last} steps");
    compare(world, &resumed);
}

/// Holds the variables after so many steps to those of a run that was never killed, by hash.
fn compare(world: usize, found: &[(usize, u64)]) {
    let whole = Mutex::new(Vec::new());
    let (end, _) = found[found.len() - 1];
    train(world, (None, end), &|told, _, vars| {
        if matches!(told, Told::Resumed | Told::Stepped) {
            whole.lock().unwrap().push(hash(vars));
        }
    });
    let whole = whole.into_inner().unwrap();
    assert_ne!(whole[end], whole[0]);
    for (at, (steps, hash)) in found.iter().enumerate() {
        assert_eq!(*hash, whole[*steps], "start {at}: after {steps} steps");
    }
}

#[test]
fn a_run_killed_within_saves_behind_training_resumes_to_the_same_parameters() {
    kill_within_saves(1, 5);
    kill_within_saves(2, 5);
}

#[test]
#[ignore = "half a minute; run with --ignored"]
fn a_run_killed_100_times_within_saves_behind_resumes_to_the_same_parameters() {
    kill_within_saves(1, 100);
    kill_within_saves(2, 100);
}
