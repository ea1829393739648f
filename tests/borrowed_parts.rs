//! Steps over tensors that a framework has cut over processes of its own: each lends its parts, and
//! sums over whole tensors are shared.

use std::num::NonZeroUsize;
use std::sync::{Barrier, Mutex};

use fusestep_cpu::CpuBackend;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{
    Access, Backend, BackendError, HostList, Launch, LaunchReport, MAX_SUMS, Reduce,
};
use fusestep_planner::{
    ClipByGlobalNorm, Lender, Optimizer, Plan, PlanError, Planner, RunAlone, Sharing, Tensors,
};
use fusestep_tensor::{DType, ParamDesc, Shape};

/// Elements of each tensor, and how many of them the first of two processes has.
const TENSORS: [[usize; 2]; 4] = [[70_001, 66_000], [5, 2], [1, 0], [1024, 1024]];
const STEPS: u64 = 4;

/// The sums of all processes, which meet to share them.
struct Meeting {
    told: Mutex<Vec<Vec<f64>>>,
    barrier: Barrier,
}

impl Meeting {
    fn of(world: usize) -> Self {
        Self { told: Mutex::new(vec![Vec::new(); world]), barrier: Barrier::new(world) }
    }
}

/// One process: its part of each list of each tensor, in the kernel's order of lists.
struct Process<'a> {
    backend: CpuBackend,
    rank: usize,
    parts: Vec<Vec<Mutex<Vec<f32>>>>,
    /// `None` if the process has whole tensors.
    meeting: Option<&'a Meeting>,
    /// What sharing fails with.
    fails: bool,
}

fn value(tensor: usize, element: usize, step: u64) -> f32 {
    let mixed = (element as u64 * 7919 + tensor as u64 * 104_729 + step * 1_299_709) % 2003;
    mixed as f32 / 1001.0 - 1.0
}

impl<'a> Process<'a> {
    /// The process with these elements of each tensor.
    fn of(rank: usize, elements: &[std::ops::Range<usize>], meeting: Option<&'a Meeting>) -> Self {
        let parts = elements.iter().enumerate().map(|(tensor, own)| {
            let params = own.clone().map(|element| value(tensor, element, 0)).collect();
            let zeros = || Mutex::new(vec![0.0; own.len()]);
            vec![Mutex::new(params), zeros(), zeros(), zeros()]
        });
        Self {
            backend: CpuBackend::new(NonZeroUsize::new(2).unwrap()),
            rank,
            parts: parts.collect(),
            meeting,
            fails: false,
        }
    }

    fn give_gradients(&self, elements: &[std::ops::Range<usize>], step: u64) {
        for (tensor, own) in elements.iter().enumerate() {
            let grads = own.clone().map(|element| value(tensor, element, step)).collect();
            *self.parts[tensor][1].lock().unwrap() = grads;
        }
    }
}

impl Lender for Process<'_> {
    fn backend(&self) -> &dyn Backend {
        &self.backend
    }

    fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        let members = launch.members;
        self.backend.launch_borrowed(launch, &|piece| {
            let tensor = &self.parts[members[piece.tensor()] as usize];
            let mut held: Vec<_> = tensor.iter().map(|list| list.lock().unwrap()).collect();
            let mut held = held.iter_mut();
            piece.update_lists(|_, declared| {
                let bytes = bytemuck::cast_slice_mut(held.next()?.as_mut_slice());
                Some(match declared.access {
                    Access::Read => HostList::Read(bytes),
                    _ => HostList::ReadWrite(bytes),
                })
            })
        })
    }

    fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        let members = reduce.members;
        self.backend.reduce_borrowed(reduce, &|gradient| {
            let own = self.parts[members[gradient.tensor()] as usize][1].lock().unwrap();
            gradient.read(bytemuck::cast_slice(&own))
        })
    }

    fn sharing(&mut self) -> Option<&mut dyn Sharing> {
        self.meeting.is_some().then_some(self as &mut dyn Sharing)
    }
}

impl Sharing for Process<'_> {
    fn measure(
        &mut self,
        launch: &Launch<'_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        let copies: Vec<Vec<Vec<f32>>> = self
            .parts
            .iter()
            .map(|lists| lists.iter().map(|list| list.lock().unwrap().clone()).collect())
            .collect();
        let lend = |tensor: usize, list: usize, _: &_| {
            bytemuck::cast_slice(&copies[launch.members[tensor] as usize][list])
        };
        self.backend.measure_borrowed(launch, &lend, sums)
    }

    fn share(&mut self, sums: &mut [f64], _: usize) -> Result<(), BackendError> {
        if self.fails {
            let reason = "the others are gone".to_owned();
            return Err(BackendError::Unavailable { backend: "test", reason });
        }
        let Some(meeting) = self.meeting else {
            return Ok(());
        };
        meeting.told.lock().unwrap()[self.rank] = sums.to_vec();
        meeting.barrier.wait();
        let told = meeting.told.lock().unwrap().clone();
        for (at, sum) in sums.iter_mut().enumerate() {
            *sum = told.iter().map(|own| own[at]).sum();
        }
        meeting.barrier.wait();
        Ok(())
    }
}

fn plan(rule: Optimizer, elements: &[std::ops::Range<usize>]) -> Plan {
    let params: Vec<ParamDesc> = elements
        .iter()
        .enumerate()
        .map(|(tensor, own)| {
            let shape = Shape::new([own.len() as u64]).unwrap();
            ParamDesc::new(format!("tensor.{tensor}"), shape, DType::F32)
        })
        .collect();
    let planner = Planner::new(rule).tensors(Tensors::BorrowedWithState);
    planner.with(ClipByGlobalNorm::new(10.0)).plan(&params).unwrap()
}

/// Trains with these elements; parameters, and the norms of all steps.
fn trained(
    rule: Optimizer,
    rank: usize,
    elements: &[std::ops::Range<usize>],
    meeting: Option<&Meeting>,
) -> (Vec<Vec<f32>>, Vec<f64>) {
    let plan = plan(rule, elements);
    let mut process = Process::of(rank, elements, meeting);
    let cpu = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&cpu).unwrap();
    let mut norms = Vec::new();
    for step in 1..=STEPS {
        process.give_gradients(elements, step);
        let run = &mut RunAlone::of(&plan, &mut state, &cpu);
        let report = run.step_borrowed(&mut process).unwrap();
        assert!(!report.skipped);
        norms.push(report.grad_norm.unwrap());
    }
    let params = process.parts.iter().map(|lists| lists[0].lock().unwrap().clone());
    (params.collect(), norms)
}

fn halves() -> [Vec<std::ops::Range<usize>>; 2] {
    [
        TENSORS.iter().map(|&[_, cut]| 0..cut).collect(),
        TENSORS.iter().map(|&[all, cut]| cut..all).collect(),
    ]
}

#[test]
fn parts_step_as_the_tensors_that_they_make_up() {
    let rules: [Optimizer; 2] =
        [Lamb { lr: 0.01, ..Lamb::default() }.into(), Lars { lr: 1.0, ..Lars::default() }.into()];
    for rule in rules {
        let whole: Vec<_> = TENSORS.iter().map(|&[all, _]| 0..all).collect();
        let (expected, expected_norms) = trained(rule, 0, &whole, None);
        let meeting = Meeting::of(2);
        let halves = halves();
        let ends = std::thread::scope(|scope| {
            let start = |rank: usize| {
                let (own, meeting) = (&halves[rank], &meeting);
                scope.spawn(move || trained(rule, rank, own, Some(meeting)))
            };
            [start(0), start(1)].map(|thread| thread.join().unwrap())
        });
        let [(first, norms), (second, others)] = ends;
        assert_eq!(norms, others, "all processes have the same bits");
        for (norm, expected) in norms.iter().zip(&expected_norms) {
            assert!((norm - expected).abs() < 1e-12 * expected, "{norm} {expected}");
        }
        for (tensor, expected) in expected.iter().enumerate() {
            let found = [&first[tensor][..], &second[tensor][..]].concat();
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-6, "{tensor}: {found} {expected}");
            }
        }
    }
}

#[test]
fn a_sum_that_cannot_be_shared_stops_the_step_before_anything_is_written() {
    let [own, _] = halves();
    let plan = plan(Lamb::default().into(), &own);
    let meeting = Meeting::of(1);
    let mut process = Process { fails: true, ..Process::of(0, &own, Some(&meeting)) };
    let cpu = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&cpu).unwrap();
    process.give_gradients(&own, 1);
    let refused = RunAlone::of(&plan, &mut state, &cpu).step_borrowed(&mut process);
    let error = refused.unwrap_err();
    assert!(matches!(error, PlanError::Backend(_)), "{error:?}");
    assert!(error.to_string().contains("the others are gone"), "{error}");
    for (tensor, lists) in process.parts.iter().enumerate() {
        let params = lists[0].lock().unwrap();
        let expected = (0..params.len()).map(|element| value(tensor, element, 0));
        assert!(params.iter().copied().eq(expected));
    }
}

#[test]
fn in_host_memory_a_step_that_is_concluded_later_is_one_that_is_waited_for() {
    let whole: Vec<_> = TENSORS.iter().map(|&[all, _]| 0..all).collect();
    let rule = Lamb { lr: 0.01, ..Lamb::default() }.into();
    let (expected, expected_norms) = trained(rule, 0, &whole, None);
    let plan = plan(rule, &whole);
    let mut process = Process::of(0, &whole, None);
    let cpu = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&cpu).unwrap();
    for (step, expected) in (1..=STEPS).zip(expected_norms) {
        process.give_gradients(&whole, step);
        let mut run = RunAlone::of(&plan, &mut state, &cpu);
        let enqueued = run.enqueue_borrowed(&mut process).unwrap();
        assert!(!enqueued.is_known(), "a step that clips may be skipped");
        let report = run.conclude(enqueued).unwrap();
        assert_eq!((report.step, report.grad_norm), (step, Some(expected)));
    }
    for (lists, expected) in process.parts.iter().zip(expected) {
        assert_eq!(*lists[0].lock().unwrap(), expected);
    }
}
