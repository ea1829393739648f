//! Steps on parameters and gradients that lie in a framework's memory of the device, one tensor
//! each at an address of its own.

use fusestep_cuda::{BorrowedStep, BorrowedTables, CudaBackend, DeviceTensor, HostCopy};
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_launch::{
    Backend, BackendError, Buffer, Launch, LaunchLimits, LaunchReport, MAX_SUMS, Master,
    Memory as _, Precision, Reduce, StateDType,
};
use fusestep_planner::{
    Brought, ClipByGlobalNorm, DerivedFrom, Lender, Optimizer, Plan, PlanError, Planner, RunAlone,
    Sharing, State, Tensors,
};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, outcome};

use crate::common::{TINY, cpu, cuda};
use crate::framework::{Arena, Framework};

/// Parameters and gradients that the framework lends.
struct Framed<'a> {
    backend: &'a CudaBackend,
    params: Arena,
    grads: Arena,
    len_bytes: Vec<usize>,
    /// The tensor lent in place of the one with this role and position.
    instead: Option<(Role, u32, Option<DeviceTensor>)>,
    /// Tables in the device's memory; arguments without.
    tables: Option<BorrowedTables>,
    /// Whether sums go to others that may have other parts of the tensors.
    shares: bool,
}

impl<'a> Framed<'a> {
    fn of(framework: &Framework, backend: &'a CudaBackend, case: &Case) -> Self {
        let params: Vec<_> = (0..case.params.len()).map(|i| case.param_bytes(i)).collect();
        let width = case.params[0].dtype.len_bytes();
        Self {
            backend,
            params: Arena::of(framework, &params, width),
            grads: Arena::of(framework, &params, width),
            len_bytes: params.iter().map(Vec::len).collect(),
            instead: None,
            tables: None,
            shares: false,
        }
    }

    /// Has the steps' tables in the device's memory, for any number of tensors.
    fn with_tables(self) -> Self {
        Self { tables: Some(BorrowedTables::default()), ..self }
    }

    /// Begins a step with tensors at places of this number.
    fn begin(&mut self, places: u64) {
        if let Some(tables) = &mut self.tables {
            let step = BorrowedStep { places, keeps_all: true, ..BorrowedStep::default() };
            tables.begin(step);
        }
    }

    fn give_gradients(&self, case: &Case, step: u64) {
        for (index, &at) in self.grads.places.iter().enumerate() {
            self.grads.memory.write(at, &case.grad_bytes(index, step));
        }
    }

    fn lend(&self, parameter: u32, role: Role) -> Option<DeviceTensor> {
        match self.instead {
            Some((other, at, instead)) if (other, at) == (role, parameter) => return instead,
            _ => {}
        }
        let arena = match role {
            Role::Param => &self.params,
            Role::Grad => &self.grads,
            _ => return None,
        };
        let index = parameter as usize;
        let address = arena.memory.address() + arena.places[index] as u64;
        // SAFETY: the tensor lies there, was written before, and tests read it behind the launch.
        Some(unsafe { DeviceTensor::at(address, self.len_bytes[index]) })
    }
}

impl Lender for Framed<'_> {
    fn backend(&self) -> &dyn Backend {
        self.backend
    }

    fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        let mut lend = |parameter, role| self.lend(parameter, role);
        self.backend.launch_borrowed(launch, &mut lend)
    }

    fn launch_derived(
        &mut self,
        launch: Launch<'_>,
        from: DerivedFrom<'_>,
    ) -> Result<LaunchReport, BackendError> {
        let Some(mut tables) = self.tables.take() else {
            return self.launch(launch);
        };
        let mut lend = |parameter, role| self.lend(parameter, role);
        let done = tables.launch(self.backend, launch, from.rule, from.values, &mut lend);
        self.tables = Some(tables);
        done
    }

    fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        let mut tables = self.tables.take();
        let mut lend = |parameter, role| self.lend(parameter, role);
        let done = match &mut tables {
            Some(tables) => tables.reduce(self.backend, reduce, &mut lend),
            None => self.backend.reduce_borrowed(reduce, &mut lend),
        };
        self.tables = tables;
        done
    }

    fn sharing(&mut self) -> Option<&mut dyn Sharing> {
        self.shares.then_some(self as &mut dyn Sharing)
    }

    fn bring(
        &mut self,
        buffer: &dyn Buffer,
        len_bytes: usize,
    ) -> Result<Box<dyn Brought>, BackendError> {
        Ok(Box::new(OnTheWay(self.backend.begin_read(buffer, len_bytes)?)))
    }
}

/// The others have no elements.
impl Sharing for Framed<'_> {
    fn measure(
        &mut self,
        launch: &Launch<'_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        let mut lend = |parameter, role| self.lend(parameter, role);
        self.backend.measure_borrowed(launch, &mut lend, sums)
    }

    fn share(&mut self, _: &mut [f64], _: usize) -> Result<(), BackendError> {
        Ok(())
    }
}

struct OnTheWay(HostCopy);

impl Brought for OnTheWay {
    fn wait(self: Box<Self>) -> Result<Vec<u8>, BackendError> {
        self.0.wait()
    }
}

/// A planned run: its rule, its precision, and whether gradients are clipped.
#[derive(Clone, Copy, Debug)]
struct Planned {
    rule: Optimizer,
    precision: Precision,
    clip_norm: Option<f64>,
}

impl Planned {
    fn planner(&self, limits: LaunchLimits) -> Planner {
        self.with_passes(Planner::new(self.rule).limits(limits))
    }

    fn with_passes(&self, planner: Planner) -> Planner {
        let planner = planner.precision(self.precision);
        match self.clip_norm {
            Some(norm) => planner.with(ClipByGlobalNorm::new(norm)),
            None => planner,
        }
    }
}

/// A state of a plan that borrows, whose masters follow the parameters.
fn allocate(plan: &Plan, case: &Case, backend: &CudaBackend) -> State {
    let mut state = plan.allocate(backend).unwrap();
    for (index, param) in case.params.iter().enumerate() {
        let bytes = case.param_bytes(index);
        state.follow_borrowed(backend, &param.name, &bytes).unwrap();
    }
    state
}

/// The outcome on tensors that a framework lends, as `outcome` of the testkit has it.
fn outcome_borrowed(
    framework: &Framework,
    (plan, kept): (&Plan, &Plan),
    case: &Case,
    mut lender: Framed<'_>,
) -> Vec<u8> {
    let backend = lender.backend;
    let mut state = allocate(plan, case, backend);
    let mut reported = Vec::new();
    for step in 1..=case.steps {
        lender.give_gradients(case, step);
        lender.begin(1);
        let report = RunAlone::of(plan, &mut state, backend).step_borrowed(&mut lender).unwrap();
        if let Some(norm) = report.grad_norm {
            let values = [norm, report.non_finite as f64, 1.0, report.step as f64];
            reported.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
    }
    framework.synchronize();
    backend.synchronize().unwrap();
    let params = lender.params.read(&lender.len_bytes);
    let grads = lender.grads.read(&lender.len_bytes);
    // The lists in the order of a state that keeps all of them.
    let order = kept.allocate(&cpu()).unwrap();
    let mut all = Vec::new();
    for (index, param) in case.params.iter().enumerate() {
        for role in order.roles(&param.name).unwrap() {
            match role {
                Role::Param => all.extend_from_slice(&params[index]),
                Role::Grad => all.extend_from_slice(&grads[index]),
                _ => {
                    let dtype = state.dtype(role, &param.name).unwrap();
                    let entries = role.entries(param.numel()) as usize;
                    let mut bytes = vec![0; entries * dtype.len_bytes()];
                    state.read(backend, role, &param.name, &mut bytes).unwrap();
                    all.extend(bytes);
                }
            }
        }
    }
    all.extend(reported);
    all
}

/// Requires the same bits of the host, of arenas on the device and of lent tensors on it.
fn same_bits(framework: &Framework, backend: &CudaBackend, planned: Planned, case: &Case) {
    let limits = backend.limits();
    let host = planned.planner(limits).plan(&case.params).unwrap();
    let expected = outcome(&host, case, &cpu());
    assert!(outcome(&host, case, backend) == expected, "{planned:?}, in arenas");
    let naive = Planner::new(planned.rule).limits(limits).naive();
    for planner in [planned.planner(limits), planned.with_passes(naive)] {
        let plan = planner.tensors(Tensors::Borrowed).plan(&case.params).unwrap();
        let lenders = || Framed::of(framework, backend, case);
        let mut all = vec![lenders(), lenders().with_tables()];
        if planned.clip_norm.is_some() || matches!(planned.rule, Optimizer::Lamb(_)) {
            all.push(Framed { shares: true, ..lenders() });
            all.push(Framed { shares: true, ..lenders().with_tables() });
        }
        for lender in all {
            let (tables, shares) = (lender.tables.is_some(), lender.shares);
            let found = outcome_borrowed(framework, (&plan, &host), case, lender);
            let difference = found.iter().zip(&expected).position(|(a, b)| a != b);
            assert!(
                found == expected,
                "{planned:?}, {limits:?}, tables {tables}, shares {shares}: first difference at \
                 byte {difference:?} of {} ({})",
                expected.len(),
                found.len()
            );
        }
    }
}

fn rules() -> [Optimizer; 3] {
    let sgd = Sgd { momentum: 0.9, ..Sgd::default() };
    [Adam::default().into(), sgd.into(), Lamb::default().into()]
}

/// Formats of parameters: plain, and 16 bits with an f32 master; and both with state in codes.
fn formats() -> [(DType, Precision); 4] {
    let plain = Precision::default();
    let master = Precision { master: Master::F32, ..plain };
    let coded = Precision { state: StateDType::Int8, ..plain };
    let narrow = Precision { master: Master::Remainder8, ..coded };
    [(DType::F32, plain), (DType::BF16, master), (DType::F32, coded), (DType::BF16, narrow)]
}

#[test]
fn lent_tensors_arenas_and_the_host_give_the_same_bits() {
    let framework = Framework::new();
    // SAFETY: the framework lives longer than the backend.
    let adopted = unsafe { CudaBackend::adopt(framework.context(), framework.stream()) };
    let adopted = adopted.unwrap();
    for (dtype, precision) in formats() {
        let numels = [0, 1, 16_383, 16_384, 16_385, 7, 65_535, 65_536, 65_537, 0, 33];
        let whole = Case::new(numels, dtype).with_groups();
        let cut = Case::new([0, 1, 63, 64, 65, 500, 0, 191, 193], dtype).with_groups();
        for (number, rule) in rules().into_iter().enumerate() {
            for clip_norm in [None, Some(0.5)] {
                let planned = Planned { rule, precision, clip_norm };
                // Where chunks end is the same to all rules: each has them once, clipped or not.
                if number == 0 || clip_norm.is_some() == (number % 2 == 0) {
                    same_bits(&framework, &adopted, planned, &whole);
                }
                same_bits(&framework, &cuda().with_limits(TINY), planned, &cut);
            }
        }
    }
}

/// A step of AdamW in f32 on three tensors, one of which is lent otherwise.
fn step_with(
    instead: impl FnOnce(&Framed<'_>) -> Option<DeviceTensor>,
    (role, parameter): (Role, u32),
    clip_norm: Option<f64>,
) -> String {
    let (framework, backend) = (Framework::new(), cuda());
    let case = Case::new([100, 33, 5], DType::F32);
    let planned =
        Planned { rule: Adam::default().into(), precision: Precision::default(), clip_norm };
    let planner = planned.planner(backend.limits()).tensors(Tensors::Borrowed);
    let plan = planner.plan(&case.params).unwrap();
    let mut state = allocate(&plan, &case, &backend);
    let mut lender = Framed::of(&framework, &backend, &case);
    let before = lender.params.read(&lender.len_bytes);
    let instead = instead(&lender);
    lender.instead = Some((role, parameter, instead));
    let error = RunAlone::of(&plan, &mut state, &backend).step_borrowed(&mut lender).unwrap_err();
    let after = lender.params.read(&lender.len_bytes);
    assert!(before == after, "{error}: something was written");
    let PlanError::Backend(error) = error else {
        panic!("expected the backend's error, found {error}");
    };
    error.to_string()
}

#[test]
fn tensors_that_are_missing_or_lie_wrongly_are_named() {
    let at = |lender: &Framed<'_>, ahead: u64, len_bytes| {
        let address = lender.lend(1, Role::Param)?.address() + ahead;
        // SAFETY: refused before anything is enqueued, as this test shows.
        Some(unsafe { DeviceTensor::at(address, len_bytes) })
    };
    let f32_at = "expected f32 at a device address that is a multiple of 4, found";
    assert_eq!(
        step_with(|_| None, (Role::Param, 1), None),
        format!("cuda: param of parameter 1: {f32_at} none")
    );
    assert_eq!(
        step_with(|_| None, (Role::Grad, 2), Some(0.5)),
        format!("cuda: grad of parameter 2: {f32_at} none")
    );
    let odd = step_with(|lender| at(lender, 2, 132), (Role::Param, 1), None);
    assert!(odd.starts_with(&format!("cuda: param of parameter 1: {f32_at} address 0x")), "{odd}");
    // SAFETY: refused, as above.
    let null = Some(unsafe { DeviceTensor::at(0, 132) });
    assert_eq!(
        step_with(|_| null, (Role::Grad, 1), None),
        format!("cuda: grad of parameter 1: {f32_at} address 0x0")
    );
    for clip_norm in [None, Some(0.5)] {
        assert_eq!(
            step_with(|lender| at(lender, 0, 131), (Role::Grad, 1), clip_norm),
            "cuda: copy of 132 bytes at offset 0: expected a buffer of at least that length, found \
             131 bytes"
        );
    }
}

#[test]
fn a_parameter_without_a_gradient_is_not_lent_and_keeps_its_bits() {
    let (framework, backend) = (Framework::new(), cuda());
    let case = Case::new([100, 33, 5], DType::F32);
    let plan = Planner::new(Adam::default().into()).limits(backend.limits());
    let plan = plan.tensors(Tensors::Borrowed).plan(&case.params).unwrap();
    let mut state = allocate(&plan, &case, &backend);
    let mut lender = Framed::of(&framework, &backend, &case);
    lender.give_gradients(&case, 1);
    lender.instead = Some((Role::Grad, 1, None));
    state.set_without_gradient_at(1);
    let before = lender.params.read(&lender.len_bytes);
    let report = RunAlone::of(&plan, &mut state, &backend).step_borrowed(&mut lender).unwrap();
    backend.synchronize().unwrap();
    let after = lender.params.read(&lender.len_bytes);
    assert_eq!((report.elements, report.without_gradient), (105, 1));
    let changed: Vec<_> = before.iter().zip(&after).map(|(a, b)| a != b).collect();
    assert_eq!(changed, [true, false, true]);
}

#[test]
fn a_step_on_an_adopted_stream_makes_no_host_wait() {
    let framework = Framework::new();
    // SAFETY: the framework lives longer than the backend.
    let adopted = unsafe { CudaBackend::adopt(framework.context(), framework.stream()) };
    let backend = adopted.unwrap();
    let case = Case::new([100, 33, 5], DType::F32);
    let plan = Planner::new(Adam::default().into()).limits(backend.limits());
    let plan = plan.tensors(Tensors::Borrowed).plan(&case.params).unwrap();
    let mut state = allocate(&plan, &case, &backend);
    let mut lender = Framed::of(&framework, &backend, &case);
    lender.give_gradients(&case, 1);
    // The module is loaded, and the memory for addresses is there.
    let step = |state: &mut State, lender: &mut Framed<'_>| {
        RunAlone::of(&plan, state, &backend).step_borrowed(lender).unwrap();
    };
    step(&mut state, &mut lender);
    framework.synchronize();
    let before = lender.params.read(&lender.len_bytes);
    // A stream that records refuses to be waited for: error 900.
    let graph = framework.record(|| step(&mut state, &mut lender));
    assert!(lender.params.read(&lender.len_bytes) == before, "done although it is recorded");
    framework.run(graph.unwrap());
    assert!(lender.params.read(&lender.len_bytes) != before, "not recorded");
}

#[test]
fn a_step_that_is_concluded_later_ends_as_one_that_is_waited_for() {
    let framework = Framework::new();
    // SAFETY: the framework lives longer than the backend.
    let adopted = unsafe { CudaBackend::adopt(framework.context(), framework.stream()) };
    let backend = adopted.unwrap();
    let case = Case::new([100, 33, 5], DType::F32);
    for clip_norm in [None, Some(0.5)] {
        let planned =
            Planned { rule: Adam::default().into(), precision: Precision::default(), clip_norm };
        let planner = planned.planner(backend.limits()).tensors(Tensors::Borrowed);
        let plan = planner.plan(&case.params).unwrap();
        let mut states = [(); 2].map(|()| allocate(&plan, &case, &backend));
        let mut lenders = [(); 2].map(|()| Framed::of(&framework, &backend, &case));
        for step in 1..=3 {
            for lender in &lenders {
                lender.give_gradients(&case, step);
            }
            let mut waited = RunAlone::of(&plan, &mut states[0], &backend);
            let expected = waited.step_borrowed(&mut lenders[0]).unwrap();
            let mut later = RunAlone::of(&plan, &mut states[1], &backend);
            let enqueued = later.enqueue_borrowed(&mut lenders[1]).unwrap();
            assert_eq!(enqueued.is_known(), clip_norm.is_none());
            assert_eq!(later.conclude(enqueued).unwrap(), expected);
        }
        framework.synchronize();
        let [expected, found] = lenders.map(|lender| lender.params.read(&lender.len_bytes));
        assert!(expected == found);
    }
}

#[test]
fn a_copy_to_the_host_is_that_of_its_place_in_the_stream() {
    let backend = cuda();
    let mut buffer = backend.allocate(8).unwrap();
    backend.write(buffer.as_mut(), 0, &[1; 8]).unwrap();
    let first = backend.begin_read(buffer.as_ref(), 4).unwrap();
    backend.write(buffer.as_mut(), 0, &[2; 8]).unwrap();
    let second = backend.begin_read(buffer.as_ref(), 4).unwrap();
    assert_eq!((first.wait().unwrap(), second.wait().unwrap()), (vec![1; 4], vec![2; 4]));
    drop(backend.begin_read(buffer.as_ref(), 8).unwrap());
    let error = backend.begin_read(buffer.as_ref(), 9).unwrap_err().to_string();
    assert!(error.contains("found 8 bytes"), "{error}");
}

#[test]
fn tables_are_copied_where_tensors_have_moved() {
    let framework = Framework::new();
    // SAFETY: the framework lives longer than the backend.
    let adopted = unsafe { CudaBackend::adopt(framework.context(), framework.stream()) };
    let backend = adopted.unwrap();
    let case = Case::new([5, 1, 16_385, 7, 65_537], DType::F32).with_groups();
    let rule = Optimizer::from(Adam::default());
    let planner = Planner::new(rule).with(ClipByGlobalNorm::new(0.5)).limits(backend.limits());
    let plan = planner.tensors(Tensors::Borrowed).plan(&case.params).unwrap();
    let mut state = allocate(&plan, &case, &backend);
    let mut lender = Framed::of(&framework, &backend, &case).with_tables();
    let other = Framed::of(&framework, &backend, &case);
    let mut copied = Vec::new();
    // The second and the third step have no number, so that the lender is asked.
    for (step, places) in (1..).zip([7, 0, 0, 7, 7, 8, 8]) {
        lender.give_gradients(&case, step);
        if step == 6 {
            lender.instead = Some((Role::Grad, 3, other.lend(3, Role::Grad)));
            other.give_gradients(&case, step);
        }
        lender.begin(places);
        let before = lender.tables.as_ref().unwrap().copied_bytes();
        RunAlone::of(&plan, &mut state, &backend).step_borrowed(&mut lender).unwrap();
        copied.push(lender.tables.as_ref().unwrap().copied_bytes() - before);
    }
    assert!(copied[0] > 0 && copied[5] > 0 && copied[5] <= 16, "{copied:?}");
    assert_eq!([&copied[1..5], &copied[6..]].concat(), [0; 5]);
    assert!(!lender.tables.unwrap().is_recorded());
}
