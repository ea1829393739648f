//! Errors of making, allocating and running a plan.

use fusestep_amp::AmpError;
use fusestep_coalesce::CoalesceError;
use fusestep_collective::CollectiveError;
use fusestep_launch::{BackendError, LaunchError, RuleError};
use fusestep_schedule::ScheduleError;
use fusestep_tensor::{DType, Quoted, Role, TensorError, advised, counted};
use fusestep_tensor_file::TensorFileError;

/// Result of a function of this crate that can fail.
pub(crate) type Result<T, E = PlanError> = std::result::Result<T, E>;

/// Error of making, allocating or running a plan. Unless the error says otherwise, nothing has been
/// written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // Messages say what the fields are.
pub enum PlanError {
    /// A descriptor or a list of descriptors is wrong.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A hyper-parameter is out of range.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// A number of the learning-rate schedule is out of range.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// A loss scale or a limit of the norm is out of range.
    #[error(transparent)]
    Amp(#[from] AmpError),
    /// A pass that is allowed once was given twice.
    #[error("{pass}: expected the pass once, found it twice; remove one")]
    PassTwice { pass: &'static str },
    /// Two passes contradict each other.
    #[error("{first} and {second} {}", advised(why))]
    Conflict {
        first: String,
        second: String,
        /// Reason why the two contradict each other, in words; advice beyond removing one stands
        /// behind a semicolon.
        why: &'static str,
    },
    /// The slices that ranks have of a parameter do not fit each other, or not this rank's.
    #[error("slices of `{name}`: expected {expected}, found {found}", name = Quoted(name))]
    Slices { name: String, expected: String, found: String },
    /// A rank, a world size or a communicator does not fit the plan.
    #[error("ranks: expected {expected}, found {found}")]
    Topology { expected: String, found: String },
    /// A call between ranks failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A checkpoint or a state file cannot be written, or is not complete, intact and this run's.
    #[error("{path}: `{what}`: expected {expected}, found {found}", what = Quoted(what))]
    Checkpoint {
        path: String,
        /// The tensor or field.
        what: String,
        expected: String,
        found: String,
    },
    /// Another rank could not do its part of a common operation, and returns an error of its own.
    #[error("rank {rank}: {reason}")]
    OtherRank {
        rank: usize,
        /// Error of that rank, or its beginning.
        reason: String,
    },
    /// A gradient was given twice in one micro-step.
    #[error(
        "gradient of `{name}`: expected it once in a micro-step, found it twice; run the step first",
        name = Quoted(name)
    )]
    GradientTwice { name: String },
    /// A step has updated some buckets in backward, and the call needs a state between two steps.
    #[error(
        "{what}: expected a state between two steps, found one whose step {step} has updated \
         {} in backward; end it by `step` first",
        counted(*updated as u64, "parameter")
    )]
    StepUnderWay {
        what: &'static str,
        step: u64,
        /// Parameters that the step has updated.
        updated: usize,
    },
    /// A parameter lies in shards.
    #[error(
        "`{name}`: expected a parameter that this rank holds whole, found zero stage 3; use `gather`",
        name = Quoted(name)
    )]
    InShards { name: String },
    /// The limits do not allow a launch.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The tensors cannot be laid out.
    #[error(transparent)]
    Coalesce(#[from] CoalesceError),
    /// Memory or device.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A state file cannot be read or written.
    #[error(transparent)]
    File(#[from] TensorFileError),
    /// The rule cannot be changed to one that keeps other tensors.
    #[error("optimizer: expected a rule of the lists {expected}, found one of {found}; plan anew")]
    OtherLists { expected: String, found: String },
    /// The rule cannot be changed to one whose kernel takes other scalars or sums.
    #[error(
        "optimizer: expected a rule with the arguments of {expected}, found {found}; plan anew"
    )]
    OtherRule { expected: &'static str, found: &'static str },
    /// The plan has no such rule.
    #[error("rule {rule}: expected one of the plan's {count}, counted from 0")]
    UnknownRule { rule: usize, count: usize },
    /// An update cannot have so many micro-batches.
    #[error("micro-batches of the update: expected {expected}, found {found}")]
    MicroBatches { expected: String, found: u64 },
    /// The weight of a micro-step is out of range.
    #[error("weight of the micro-step: expected a number from 2e-38 to 3e38, found {found}")]
    Weight { found: f64 },
    /// A micro-step was weighed after gradients of it had been added.
    #[error(
        "weight of the micro-step: expected before its first gradient, found behind {}; set it \
         when the micro-step begins",
        counted(*given as u64, "gradient")
    )]
    WeightLate {
        /// Gradients that have been given.
        given: usize,
    },
    /// Ranks of one run differ in a setting that decides its bits.
    #[error(
        "{field}: expected {expected} as on rank 0, found {found} on rank {rank}; start all ranks \
         with the same settings"
    )]
    RanksDiffer {
        field: String,
        /// Rank 0's value.
        expected: String,
        rank: usize,
        found: String,
    },
    /// The rule has no kernel for a parameter's dtype, or none that keeps it as asked for.
    #[error("`{name}`: {error}", name = Quoted(name))]
    Kernel { name: String, error: RuleError },
    /// The state cannot make a master weight of a borrowed parameter.
    #[error(
        "master of `{name}`: expected values before the first step, found none, because the caller lends the parameter; give them with `follow_borrowed`, write role master, or load a state",
        name = Quoted(name)
    )]
    BorrowedMaster { name: String },
    /// Gradients would be cut into more buckets than a plan can hold.
    #[error(
        "buckets: expected at most {expected} for {world} ranks, found more; raise the cap of a \
         bucket, or fuse them where each tensor has one"
    )]
    TooManyBuckets {
        expected: usize,
        /// Ranks that share out the buckets; each has a part of every bucket.
        world: usize,
    },
    /// There are more parameters than a plan can number.
    #[error("parameter list: expected at most 4294967295 parameters, found {found}")]
    TooManyParameters { found: usize },
    /// The plan has no parameter of this name.
    #[error(
        "`{name}`: expected one of the plan's {}, found none of this name",
        counted(*parameters as u64, "parameter"),
        name = Quoted(name)
    )]
    UnknownName { name: String, parameters: usize },
    /// The plan keeps no such tensor.
    #[error("{role} of `{name}`: expected a tensor that this plan keeps, found none; {hint}", name = Quoted(name))]
    NoSuchList {
        role: Role,
        name: String,
        /// Hint at a call or a plan that would work.
        hint: &'static str,
    },
    /// The tensor has another dtype.
    #[error("{role} of `{name}`: expected {expected}, found {found}", name = Quoted(name))]
    WrongDType { role: Role, name: String, expected: DType, found: DType },
    /// The bytes given are not the tensor's.
    #[error("{role} of `{name}`: expected {expected} bytes, found {found}", name = Quoted(name))]
    LenBytes { role: Role, name: String, expected: usize, found: usize },
    /// Device memory has no views on the host.
    #[error(
        "{role} of `{name}`: expected host memory for a view, found {backend} memory; use `read` and `write`",
        name = Quoted(name)
    )]
    NotOnHost { role: Role, name: String, backend: &'static str },
    /// Host memory has no views on a device, nor has memory that a call under way is using.
    #[error(
        "grad of `{name}`: expected memory of a device that no call is using, found none; use \
         `grad_mut` on the host, or give it before its bucket is reduced",
        name = Quoted(name)
    )]
    NotOnDevice { name: String },
    /// The state was allocated from another plan.
    #[error(
        "state: expected one allocated from this plan (hash {expected:016x}), found hash \
         {found:016x}; allocate it anew"
    )]
    ForeignState { expected: u64, found: u64 },
    /// Parameters have changed while copies of them were on their way.
    #[error(
        "parameters asked for ahead: expected none to change until they are there, found \
         {} since; wait for them first",
        counted(*changes, "change")
    )]
    StaleParams {
        /// Updates, averages and writes of parameters since the copies were asked for.
        changes: u64,
    },
    /// An earlier step failed half-way, so the state may be half-changed.
    #[error(
        "state: expected an intact state, found one whose step {step} failed half-way; load \
         it from a file"
    )]
    Poisoned { step: u64 },
    /// Resident tables hold addresses, and borrowed tensors may have others at every step.
    #[error(
        "tables: expected tensors that the state keeps for resident ones, found tensors that the \
         caller lends; plan with arguments"
    )]
    BorrowedTable,
    /// A step cannot be enqueued without waiting for it, or cannot be recorded.
    #[error(
        "step: expected one that the device runs without the host, found that {found}; plan with \
         resident tables, or use `step_all`"
    )]
    NotCapturable { found: &'static str },
    /// A graph was recorded on tables that the state no longer uses.
    #[error(
        "graph: expected one recorded on the state's tables, found one of others; record it anew"
    )]
    StaleGraph,
    /// The host has not read yet whether the device took or skipped enqueued steps.
    #[error(
        "state: expected every step's outcome to be known, found {} enqueued and not read; \
         call `settle`",
        counted(*pending, "step")
    )]
    Unsettled {
        /// Steps enqueued since the host last read.
        pending: u64,
    },
    /// A tensor's step count cannot exceed the state's.
    #[error(
        "step of `{name}`: expected at most the state's step {expected}, found {found}; set the state's step first",
        name = Quoted(name)
    )]
    StepAhead { name: String, expected: u64, found: u64 },
    /// A save after every 0 steps would save nothing.
    #[error(
        "checkpoint_every: expected a save after every 1 step or more, found 0; leave the call out \
         to save nothing"
    )]
    SaveEvery0,
}

impl PlanError {
    /// Whether the error comes from saving or resuming. All ranks return such an error in the same
    /// call, and it leaves the run as it was: training may go on.
    pub fn is_of_checkpoint(&self) -> bool {
        matches!(self, Self::Checkpoint { .. } | Self::File(_) | Self::OtherRank { .. })
    }
}
