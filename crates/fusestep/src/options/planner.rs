//! From settings to a planner.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use fusestep_collective::{CollectiveError, Communicator};
use fusestep_launch::{GradDType, LaunchLimits, Precision, StateDType};
use fusestep_planner::{
    ClipByGlobalNorm, Comms, Distributed, FuseAllReduce, FuseBroadcast, FuseReduceIntoUpdate,
    GradientAccumulation, Lanes, LocalSgd, LossScaling, Ownership, PlanError, Planner, Reach,
    ReduceDType, Shard, TableKind, Topology, UpdateInBackward, UpdateNorms, ZeroStage, in_f32,
    keeps_f32,
};
use fusestep_tensor::{DType, ParamDesc};

use super::{Changed, Names, OfParams, OptionError, OwnRule, PrecisionOf, Section, StepOptions};

/// Most parameters that a refusal names.
const NAMED: usize = 3;

/// Most buckets of a plan.
const MOST_BUCKETS: u64 = 1 << 14;

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

impl StepOptions {
    /// The planner with every pass asked for; the only function that makes one of settings.
    ///
    /// Settings that were not given are chosen from [`StepOptions::figures`] first. Ranks that have
    /// figures agree on the choice before they plan ([`StepOptions::agreed`]).
    ///
    /// # Errors
    /// As [`StepOptions::check`]; [`OptionError::Buckets`].
    pub fn planner(
        &self,
        params: &[ParamDesc],
        topology: Topology,
        limits: LaunchLimits,
    ) -> Result<Planner, OptionError> {
        if self.figures.is_some() {
            return self.chosen(params, topology, limits)?.planner(params, topology, limits);
        }
        self.check(topology.world)?;
        if topology.world > 1 || self.update_in_backward {
            self.check_buckets(params)?;
        }
        let mut planner = Planner::new(self.rule)
            .limits(self.limits(limits))
            .precision(self.precision)
            .keep_f32(self.keep_f32.iter().cloned())
            .reduce_dtype(self.reduce_dtype)
            .table(self.table_kind(limits));
        for of in &self.precision_of {
            planner = planner.precision_of(of.dtype, of.precision);
        }
        for (group, names) in self.groups.iter().zip(self.names_of_groups(params)) {
            planner = planner.group(names, group.rule);
        }
        if let Some(schedule) = &self.schedule {
            planner = planner.schedule(schedule.clone());
        }
        if self.naive {
            planner = planner.naive();
        }
        Ok(self.with_calls(self.with_gradients(planner), topology))
    }

    /// How exactly a parameter and its state are kept in plans of these settings.
    pub fn precision_for(&self, param: &ParamDesc) -> Precision {
        let own = self.precision_of.iter().find(|of| of.dtype == param.dtype);
        let precision = own.map_or(self.precision, |of| of.precision);
        let keeps_f32 = keeps_f32(param, &self.keep_f32);
        let precision = match precision.state {
            StateDType::Int8 if keeps_f32 => in_f32(precision),
            _ => precision,
        };
        let adds_in_f32 = self.lanes.is_some() || self.reduce_dtype == ReduceDType::F32;
        if adds_in_f32 { of_f32_gradients(param.dtype, precision) } else { precision }
    }

    /// The first setting that takes norms or counts of all gradients of a step, if one is set.
    pub fn takes_all_gradients(&self) -> Option<&'static str> {
        let clips = self.clip_norm.map(|_| "clip_norm");
        clips.or(self.loss_scale.map(|_| "loss_scale"))
    }

    /// Whether ranks average parameters in place of gradients.
    pub fn averages(&self) -> bool {
        self.local_sgd.is_some()
    }

    /// Whether every micro-step is an update.
    pub fn is_update_each(&self) -> bool {
        self.accumulate == 1 && self.lanes.is_none()
    }

    /// Micro-batches of an update, of all ranks together where there are lanes, otherwise of one.
    pub fn micro_batches(&self) -> u64 {
        u64::from(self.lanes.unwrap_or(1)) * u64::from(self.accumulate)
    }

    /// These settings without lanes, for updates of as many micro-batches on `world` ranks: their
    /// sums follow the order of ranks. `None` without lanes, or where the ranks' numbers of
    /// micro-batches would not be equal.
    pub fn in_rank_order(&self, world: usize) -> Option<Self> {
        let (all, world) = (self.micro_batches(), world as u64);
        let is_even = self.lanes.is_some() && world > 0 && all.is_multiple_of(world);
        let accumulate = is_even.then(|| u32::try_from(all / world).ok()).flatten()?;
        Some(Self { lanes: None, accumulate, ..self.clone() })
    }

    /// Refuses settings without effect where one process lends its tensors for each step: those of
    /// many ranks, and sums over micro-steps, updates in backward and resident tables, which need
    /// tensors of the optimizer's own. Gradients in f32 are lent like others.
    ///
    /// # Errors
    /// [`OptionError::NeedsRanks`] names the first.
    pub fn check_borrowed(&self) -> Result<(), OptionError> {
        let own = self.changed()?.into_iter().find(|changed| {
            let of_own = [Section::MicroSteps, Section::Backward];
            let is_resident = changed.name == "tables" && self.tables == TableKind::Resident;
            let is_lent =
                changed.name == ReduceDType::NAME && self.reduce_dtype == ReduceDType::F32;
            of_own.contains(&changed.section) && !is_lent || is_resident
        });
        match own {
            Some(Changed { name, .. }) => Err(OptionError::NeedsRanks {
                name,
                found: self.value_of(name)?.unwrap_or_default(),
            }),
            None => self.check_alone(),
        }
    }

    /// These settings with gradients of f16 or bf16 parameters of this dtype in f32, as programs
    /// have them that add up gradients in f32. Parameters of other dtypes stay as they are.
    pub fn with_f32_gradients(mut self, dtype: DType) -> Self {
        let own = self.precision_of.iter().position(|of| of.dtype == dtype);
        let before = own.map_or(self.precision, |at| self.precision_of.swap_remove(at).precision);
        let precision = of_f32_gradients(dtype, before);
        self.precision_of.push(PrecisionOf { dtype, precision });
        self
    }

    /// These settings without those that [`StepOptions::check_borrowed`] refuses, for a plan of
    /// tensors that one process lends.
    pub fn borrowing(&self) -> Self {
        let usual = Self::of(self.rule);
        Self {
            accumulate: usual.accumulate,
            accumulated: usual.accumulated,
            reduced: usual.reduced,
            lanes: usual.lanes,
            reduce_dtype: match self.reduce_dtype {
                ReduceDType::F32 => ReduceDType::F32,
                _ => usual.reduce_dtype,
            },
            zero: usual.zero,
            shard_group: usual.shard_group,
            owners: usual.owners,
            broadcast_cap_mib: usual.broadcast_cap_mib,
            bucket_cap_mib: usual.bucket_cap_mib,
            comm_streams: usual.comm_streams,
            separate: usual.separate,
            update_in_backward: usual.update_in_backward,
            local_sgd: usual.local_sgd,
            local_sgd_begin: usual.local_sgd_begin,
            local_sgd_averaged: usual.local_sgd_averaged,
            local_sgd_interval: usual.local_sgd_interval,
            distributed: usual.distributed,
            initial: usual.initial,
            tables: match self.tables {
                TableKind::Resident => TableKind::Arguments,
                other => other,
            },
            ..self.clone()
        }
    }

    /// Slices of all ranks, which tell each other their shapes here; none where no parameter is
    /// distributed. They are a pass to add to the planner of many ranks, which have compared their
    /// settings ([`StepOptions::compare`]) before.
    ///
    /// # Errors
    /// Names that are not alike on all ranks, or that no parameter has; calls that fail.
    pub fn slices(
        &self,
        params: &[ParamDesc],
        comm: &mut dyn Communicator,
    ) -> Result<Option<Distributed>, PlanError> {
        if self.distributed.is_empty() {
            return Ok(None);
        }
        let names = self.distributed.iter().cloned().collect();
        Distributed::of_ranks(&names, params, &mut Comms::direct(comm)).map(Some)
    }

    /// Compares what decides the first calls of ranks.
    ///
    /// # Errors
    /// [`PlanError::RanksDiffer`] names the setting; calls that fail.
    pub fn compare(&self, comm: &mut dyn Communicator) -> Result<(), PlanError> {
        let streams = self.streams(Topology::of(comm)).to_string();
        let distributed = Distributed::told(&self.distributed.iter().cloned().collect());
        let initial = self.initial.to_string();
        let fields =
            [("comm_streams", streams), (Distributed::FIELD, distributed), ("initial", initial)];
        Comms::direct(comm).compare(&fields)
    }

    /// The calls of a rank's steps, on its communication streams and in its shard groups; all ranks
    /// make them together.
    ///
    /// # Errors
    /// A world that is no multiple of the shard group; streams that cannot be had.
    pub fn comms<'a>(&self, comm: &'a mut dyn Communicator) -> Result<Comms<'a>, CollectiveError> {
        let streams = self.streams(Topology::of(comm));
        match self.shard_group.and_then(NonZeroUsize::new) {
            Some(group) => Comms::in_groups(comm, group, streams),
            None => Ok(Comms::with_streams(comm, streams)?.reducing_when_full()),
        }
    }

    /// These settings without averages and groups of ranks, for a world of one, which has nobody to
    /// average or to share with.
    pub fn of_one(&self) -> Self {
        let usual = Self::of(self.rule);
        Self {
            shard_group: usual.shard_group,
            local_sgd: usual.local_sgd,
            local_sgd_begin: usual.local_sgd_begin,
            local_sgd_averaged: usual.local_sgd_averaged,
            local_sgd_interval: usual.local_sgd_interval,
            ..self.clone()
        }
    }

    /// These settings with every reduction, update and gather a stage of its own, as a naive plan
    /// has them in any case.
    pub fn in_parts(&self) -> Self {
        Self { separate: !self.naive, comm_streams: None, ..self.clone() }
    }

    /// Communication streams of a rank: as asked for, else none where ranks see each other's
    /// memory, since there the reduction is part of the update and has nothing to hide behind, or
    /// average parameters.
    pub fn streams(&self, topology: Topology) -> usize {
        let default = match topology.reach {
            Reach::Calls if !self.naive && !self.averages() => Comms::DEFAULT_STREAMS,
            Reach::Calls | Reach::SharedMemory => 0,
        };
        self.comm_streams.unwrap_or(default)
    }

    /// Whether ways to reduce and update, communication streams among them, may be chosen: no
    /// setting has one of its own, or nothing that streams could carry.
    pub(super) fn leaves_ways_open(&self) -> bool {
        !self.update_in_backward && !self.separate && !self.averages()
    }

    /// Other ways to reduce and update, as far as settings leave them open. `hides` says whether
    /// the length of the backward pass is known, beside which streams would reduce.
    pub(super) fn ways(&self, topology: Topology, hides: bool) -> Vec<Self> {
        let mut ways = Vec::new();
        if !self.leaves_ways_open() {
            return ways;
        }
        if self.streams(topology) == 0 {
            ways.push(Self { separate: true, ..self.clone() });
        }
        if hides && self.comm_streams.is_none() {
            let other = match topology.reach {
                Reach::Calls => 0,
                Reach::SharedMemory => Comms::DEFAULT_STREAMS,
            };
            ways.push(Self { comm_streams: Some(other), ..self.clone() });
        }
        ways
    }

    /// These limits, with the bytes of arguments that were asked for.
    pub fn limits(&self, limits: LaunchLimits) -> LaunchLimits {
        let argument_bytes = self.argument_bytes.unwrap_or(limits.argument_bytes);
        LaunchLimits { argument_bytes, ..limits }
    }

    /// Writes settings of some parameters into their descriptors.
    ///
    /// # Errors
    /// [`OptionError::Unmatched`] names a part of a name that no parameter has.
    pub fn describe(&self, params: &mut [ParamDesc]) -> Result<(), OptionError> {
        let mut each = |name, pattern: &str, change: &dyn Fn(&mut ParamDesc)| {
            let count = params.len();
            let mut matches = params.iter_mut().filter(|param| param.name.contains(pattern));
            match matches.next() {
                Some(first) => change(first),
                None => {
                    let some = params.iter().take(NAMED);
                    let such_as = some.map(|param| param.name.clone()).collect();
                    let found = pattern.to_owned();
                    return Err(OptionError::Unmatched { name, such_as, found, count });
                }
            }
            matches.for_each(change);
            Ok(())
        };
        for pattern in &self.exclude {
            each("exclude", pattern, &|param| param.weight_decay = Some(0.0))?;
        }
        for pattern in &self.keep_f32 {
            each("keep_f32", pattern, &|_| ())?;
        }
        for OfParams { pattern, value } in &self.weight_decay_of {
            each("weight_decay_of", pattern, &|param| param.weight_decay = Some(*value))?;
        }
        for OfParams { pattern, value } in &self.lr_scale {
            each("lr_scale", pattern, &|param| param.lr_scale = *value)?;
        }
        for OfParams { pattern, value } in &self.trust_of {
            each("trust_of", pattern, &|param| param.trust = Some(*value))?;
        }
        for own in &self.groups {
            if let Names::Containing(parts) = &own.of {
                parts.iter().try_for_each(|part| each("groups", part, &|_| {}))?;
            }
        }
        self.check_trust(params)
    }

    /// Refuses names of which every parameter is too small for state in int8, where that is asked
    /// for. `params` are those of a whole model: of a part of it such names may be right.
    ///
    /// # Errors
    /// [`OptionError::KeptAnyway`] names the first.
    pub fn check_kept(&self, params: &[ParamDesc]) -> Result<(), OptionError> {
        let mut precisions = self.precision_of.iter().map(|of| of.precision);
        let is_int8 = |precision: Precision| precision.state == StateDType::Int8;
        if !is_int8(self.precision) && !precisions.any(is_int8) {
            return Ok(());
        }
        for pattern in &self.keep_f32 {
            let matches = params.iter().filter(|param| param.name.contains(pattern.as_str()));
            let largest = matches.max_by_key(|param| param.numel());
            if let Some(param) = largest.filter(|param| keeps_f32(param, &[])) {
                return Err(OptionError::KeptAnyway {
                    found: pattern.clone(),
                    param: param.name.clone(),
                    numel: param.numel(),
                });
            }
        }
        Ok(())
    }

    /// Refuses a cap that cuts a model's gradients into more buckets than a plan can have: it would
    /// take minutes to make, and every step as many calls.
    ///
    /// # Errors
    /// [`OptionError::Buckets`], with the least cap that works.
    pub fn check_buckets(&self, params: &[ParamDesc]) -> Result<(), OptionError> {
        let Some(cap) = self.bucket_cap_mib else {
            return Ok(());
        };
        let elements: u64 = params.iter().map(ParamDesc::numel).sum();
        let width = params.iter().map(|param| param.dtype.len_bytes()).max().unwrap_or(1) as u64;
        // A bucket has an element at least.
        let of_bucket = ((cap * MIB) as u64 / width).max(1);
        let found = elements.div_ceil(of_bucket);
        if found <= MOST_BUCKETS {
            return Ok(());
        }
        let least = (elements.div_ceil(MOST_BUCKETS) * width) as f64 / MIB;
        // Rounded up to two digits, which are all that is printed.
        let unit = 10f64.powi(least.log10().floor() as i32 - 1);
        let digits = format!("{:.1e}", (least / unit).ceil() * unit);
        let least = digits.parse().unwrap_or(least);
        Err(OptionError::Buckets { most: MOST_BUCKETS, found, least })
    }

    /// Refuses trust ratios of parameters whose rules have none.
    fn check_trust(&self, params: &[ParamDesc]) -> Result<(), OptionError> {
        let named =
            if self.trust_of.is_empty() { Vec::new() } else { self.names_of_groups(params) };
        let rule_of = |param: &&ParamDesc| {
            let group = named.iter().position(|names| names.contains(&param.name));
            group.map_or(self.rule, |group| self.groups[group].rule)
        };
        for OfParams { pattern, .. } in &self.trust_of {
            let matches = params.iter().filter(|param| param.name.contains(pattern.as_str()));
            let mut rules = matches.map(|param| rule_of(&param));
            let Some(first) = rules.next() else {
                continue;
            };
            if !first.has_trust() && !rules.any(|rule| rule.has_trust()) {
                return Err(OptionError::NoTrust { found: pattern.clone(), rule: first.name() });
            }
        }
        Ok(())
    }

    /// The names of every group's parameters; a parameter that several groups' parts are in belongs
    /// to the first of them.
    fn names_of_groups(&self, params: &[ParamDesc]) -> Vec<Vec<String>> {
        let has = |own: &OwnRule, name: &str| match &own.of {
            Names::Whole(names) => names.iter().any(|whole| whole == name),
            Names::Containing(parts) => parts.iter().any(|part| name.contains(part.as_str())),
        };
        let first = |name: &str| self.groups.iter().position(|own| has(own, name));
        let names = || params.iter().map(|param| &param.name);
        let mut of_groups = Vec::new();
        for own in &self.groups {
            let at = of_groups.len();
            of_groups.push(match &own.of {
                Names::Whole(names) => names.clone(),
                Names::Containing(_) => {
                    names().filter(|name| first(name) == Some(at)).cloned().collect()
                }
            });
        }
        of_groups
    }

    /// Adds what is done to all gradients of a step, and to its micro-steps.
    fn with_gradients(&self, mut planner: Planner) -> Planner {
        if let Some(max_norm) = self.clip_norm {
            planner = planner.with(ClipByGlobalNorm::new(max_norm));
        }
        if let Some(scale) = self.loss_scale {
            planner = planner.with(LossScaling::from(scale));
        }
        if self.update_norms {
            planner = planner.with(UpdateNorms);
        }
        if let Some(every) = NonZeroU32::new(self.accumulate).filter(|every| every.get() > 1) {
            let (accumulated, reduced) = (self.accumulated, self.reduced);
            planner = planner.with(GradientAccumulation { every, accumulated, reduced });
        }
        if let Some(lanes) = self.lanes.and_then(NonZeroU32::new) {
            planner = planner.with(Lanes::new(lanes));
        }
        planner
    }

    /// Adds what ranks share out and how they reduce.
    fn with_calls(&self, mut planner: Planner, topology: Topology) -> Planner {
        if let Some(every) = self.local_sgd.and_then(NonZeroU64::new) {
            planner = planner.with(LocalSgd {
                every,
                begin: self.local_sgd_begin,
                averaged: self.local_sgd_averaged,
                interval: self.local_sgd_interval,
            });
        }
        let zero = ZeroStage::of(self.zero).unwrap_or_default();
        if zero != ZeroStage::None {
            let shard = Shard::new(zero).ownership(self.owners);
            // An optimizer is planned for one rank before it joins others; `comms` refuses a group
            // that their world does not hold.
            let group = self.shard_group.filter(|_| topology.world > 1);
            planner = planner.with(match group.and_then(NonZeroUsize::new) {
                Some(group) => shard.group(group),
                None => shard,
            });
        }
        let bytes = |mib: f64| (mib * MIB) as u64;
        let cap_bytes = self.bucket_cap_mib.map_or(FuseAllReduce::DEFAULT_CAP_BYTES, bytes);
        if self.update_in_backward {
            planner = planner.with(UpdateInBackward::of_bytes(cap_bytes));
        }
        // One rank reduces nothing; notes that say so would only be in the way.
        if topology.world == 1 || self.naive {
            return planner;
        }
        planner = planner.with(FuseAllReduce::of_bytes(cap_bytes));
        if self.owners == Ownership::Tensors {
            let cap_bytes = self.broadcast_cap_mib.map(bytes);
            planner = planner
                .with(cap_bytes.map_or_else(FuseBroadcast::default, FuseBroadcast::of_bytes));
        }
        if self.streams(topology) == 0 && !self.separate {
            planner = planner.with(FuseReduceIntoUpdate);
        }
        planner
    }
}

/// A precision with gradients of 16-bit parameters in f32.
fn of_f32_gradients(dtype: DType, precision: Precision) -> Precision {
    match dtype {
        DType::F16 | DType::BF16 => Precision { grad: GradDType::Compute, ..precision },
        _ => precision,
    }
}
