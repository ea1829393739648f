//! What a save costs a training step: the call that begins one behind training beside a plain copy
//! of the same bytes, what steps lose until it is complete, and a save that is waited for.
//! ResNet-50 under Adam, 307 MB of parameters and state.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fusestep_checkpoint::{Manifest, Saves, save};
use fusestep_collective::{Collectives, Communicator, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{
    Comms, FuseAllReduce, FuseReduceIntoUpdate, Plan, Planner, Run, RunToSave, Shard, State,
    Topology, ZeroStage,
};
use fusestep_tensor::ParamDesc;

#[path = "support/shapes.rs"]
#[expect(dead_code, reason = "other benches use other sets")]
mod shapes;
#[path = "support/timing.rs"]
mod timing;

use timing::group;

/// Bytes of an element's parameter and two moments.
const SAVED_BYTES: u64 = 12;

/// What is timed.
#[derive(Clone, Copy, Debug)]
enum Timed {
    /// A copy of as many bytes as each rank saves, into memory that has been written before.
    Copy,
    /// The call that begins a save.
    Call,
    /// How much longer steps take from that call on until the save is complete.
    Lost,
    /// A save that is waited for.
    InLine,
}

const TIMED: [(&str, Timed); 4] = [
    ("copy_of_the_state", Timed::Copy),
    ("call_that_begins", Timed::Call),
    ("steps_lose_in_all", Timed::Lost),
    ("save_in_line", Timed::InLine),
];

/// A rank that steps and saves.
struct Rank<'a> {
    plan: Plan,
    backend: CpuBackend,
    state: State,
    comms: Comms<'a>,
    grads: Vec<(String, Vec<u8>)>,
    saves: Saves,
    folder: PathBuf,
}

impl<'a> Rank<'a> {
    fn new(params: &[ParamDesc], comm: &'a mut dyn Communicator, folder: &Path) -> Self {
        let topology = Topology::of(comm);
        let mut planner = Planner::new(Adam::default().into());
        if topology.world > 1 {
            planner = planner
                .with(FuseAllReduce::of_bytes(25 << 20))
                .with(Shard::new(ZeroStage::One))
                .with(FuseReduceIntoUpdate);
        }
        let plan = planner.plan_for(params, topology).expect("a plan");
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let own = NonZeroUsize::new(threads / topology.world).unwrap_or(NonZeroUsize::MIN);
        let backend = CpuBackend::new(own);
        let state = plan.allocate_on(&backend, comm).expect("memory");
        let grad = |param: &ParamDesc| {
            let bytes = 0.01f32.to_le_bytes().repeat(param.numel() as usize);
            (param.name.clone(), bytes)
        };
        Self {
            grads: params.iter().map(grad).collect(),
            plan,
            backend,
            state,
            comms: Comms::direct(comm),
            saves: Saves::new(),
            folder: folder.to_owned(),
        }
    }

    fn step(&mut self) {
        let (state, comms) = (&mut self.state, &mut self.comms);
        self.saves.poll(comms).expect("a save that goes well");
        let mut run = Run::of(&self.plan, state, &self.backend, comms);
        for (name, grad) in &self.grads {
            run.push_grad(name, grad).expect("a gradient of the plan");
        }
        run.step().expect("equal calls");
    }

    fn begin(&mut self) {
        let run = RunToSave::of(&self.plan, &self.state, &self.backend);
        self.saves
            .begin(run, &mut self.comms, &self.folder, BTreeMap::new())
            .expect("a save that begins");
    }

    fn finish(&mut self) {
        let finished = self.saves.finish(&mut self.comms);
        finished.expect("a save that goes well");
    }

    fn in_line(&mut self) {
        let (state, backend) = (&self.state, &self.backend);
        save(
            RunToSave::of(&self.plan, state, backend),
            &mut self.comms,
            &self.folder,
            BTreeMap::new(),
        )
        .expect("a save that goes well");
    }

    /// Bytes that this rank saves: it has its shard's state, and rank 0 all parameters.
    fn saved_bytes(&mut self) -> usize {
        let elements: u64 = self.plan.params().iter().map(ParamDesc::numel).sum();
        let comm = self.comms.communicator();
        let state = elements * (SAVED_BYTES - 4) / comm.world_size() as u64;
        let params = if comm.rank() == 0 { elements * 4 } else { 0 };
        (state + params) as usize
    }
}

/// Time of `rounds` on the slowest rank.
fn time(params: &[ParamDesc], ranks: usize, timed: Timed, rounds: u64) -> Duration {
    let name = format!("fusestep-bench-saves-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    let outcomes = run_ranks(ranks, &Options::default(), |mut comm| {
        let mut rank = Rank::new(params, &mut comm, &folder);
        let len_bytes = rank.saved_bytes();
        let (from, mut to) = (vec![1u8; len_bytes], vec![2u8; len_bytes]);
        rank.step();
        // The first save touches its memory for the first time.
        rank.begin();
        rank.finish();
        let step = {
            let start = Instant::now();
            for _ in 0..5 {
                rank.step();
            }
            start.elapsed() / 5
        };
        let mut spent = Duration::ZERO;
        for _ in 0..rounds {
            rank.step();
            rank.comms.communicator().barrier().expect("all ranks come");
            let start = Instant::now();
            match timed {
                Timed::Copy => black_box(&mut to).copy_from_slice(black_box(&from)),
                Timed::Call | Timed::Lost => rank.begin(),
                Timed::InLine => rank.in_line(),
            }
            rank.comms.communicator().barrier().expect("all ranks come");
            spent += start.elapsed();
            if let Timed::Lost = timed {
                let (start, mut steps) = (Instant::now(), 0);
                while rank.saves.in_flight() {
                    rank.step();
                    steps += 1;
                }
                spent += start.elapsed().saturating_sub(step * steps);
            }
            rank.finish();
        }
        Manifest::read(&folder).expect("a checkpoint");
        spent
    });
    let spent = outcomes.expect("threads").into_iter();
    let spent = spent.map(|spent| spent.expect("no panic")).max();
    std::fs::remove_dir_all(&folder).expect("a folder of this process");
    spent.unwrap_or_default()
}

fn saves(criterion: &mut Criterion) {
    let set = shapes::model("resnet50");
    for ranks in [1, 2] {
        let mut group = group(criterion, &format!("saves_of_{ranks}_ranks"));
        group.sample_size(10);
        group.throughput(Throughput::Bytes(SAVED_BYTES * set.elements()));
        for (name, timed) in TIMED {
            group.bench_function(name, |b| {
                b.iter_custom(|rounds| time(&set.params, ranks, timed, rounds));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, saves);
criterion_main!(benches);
