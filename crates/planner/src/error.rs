//! Why a plan could not be made or run.

use fusestep_amp::AmpError;
use fusestep_coalesce::CoalesceError;
use fusestep_collective::CollectiveError;
use fusestep_launch::{BackendError, LaunchError, RuleError};
use fusestep_schedule::ScheduleError;
use fusestep_tensor::{DType, Quoted, Role, TensorError, counted};
use fusestep_tensor_file::TensorFileError;

/// What a function of this crate returns that can fail.
pub(crate) type Result<T, E = PlanError> = std::result::Result<T, E>;

/// Why a plan could not be made, allocated or run. Unless it says otherwise nothing has been
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
    /// A pass that can be there once is there twice.
    #[error("{pass}: expected the pass once, found it twice; remove one")]
    PassTwice { pass: &'static str },
    /// Two passes contradict each other.
    #[error("{first} and {second} {why}; remove one")]
    Conflict {
        first: String,
        second: String,
        /// What both decide.
        why: &'static str,
    },
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
    /// Another rank could not do its part of what all do together; it has this error itself.
    #[error("rank {rank}: {reason}")]
    OtherRank {
        rank: usize,
        /// Its error, or the beginning of it.
        reason: String,
    },
    /// A gradient was given twice in one micro-step.
    #[error(
        "gradient of `{name}`: expected it once in a micro-step, found it twice; run the step first",
        name = Quoted(name)
    )]
    GradientTwice { name: String },
    /// Some buckets of a step have been updated, and others would be by something else.
    #[error(
        "{what}: expected a state between two steps, found one whose step {step} has updated \
         {} in backward; end it by `step` first",
        counted(*updated as u64, "parameter")
    )]
    StepUnderWay {
        what: &'static str,
        step: u64,
        /// Parameters that it has updated.
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
    /// A micro-step cannot be weighed so.
    #[error("weight of the micro-step: expected a number from 2e-38 to 3e38, found {found}")]
    Weight { found: f64 },
    /// A micro-step is weighed when gradients of it have been added.
    #[error(
        "weight of the micro-step: expected before its first gradient, found behind {}; set it \
         when the micro-step begins",
        counted(*given as u64, "gradient")
    )]
    WeightLate {
        /// Gradients that have been given.
        given: usize,
    },
    /// Ranks of one run differ in what decides its bits.
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
    /// The state cannot make a master of a parameter that the caller lends.
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
        /// Ranks that share out, each of which has a part of every bucket.
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
        /// What would work.
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
    /// Host memory has no views on a device, and a call that is under way has the memory.
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
        /// Updates, averages and writes of parameters since they were asked for.
        changes: u64,
    },
    /// An earlier step failed half-way, so the state may be half-changed.
    #[error(
        "state: expected an intact state, found one whose step {step} failed half-way; load \
         it from a file"
    )]
    Poisoned { step: u64 },
    /// Resident tables hold addresses, and the caller lends others at every step.
    #[error(
        "tables: expected tensors that the state keeps for resident ones, found tensors that the \
         caller lends; plan with arguments"
    )]
    BorrowedTable,
    /// A step cannot be enqueued without waiting for it, or not be recorded.
    #[error(
        "step: expected one that the device runs without the host, found that {found}; plan with \
         resident tables, or use `run`"
    )]
    NotCapturable { found: &'static str },
    /// A graph was recorded on tables that are no longer the state's.
    #[error(
        "graph: expected one recorded on the state's tables, found one of others; record it anew"
    )]
    StaleGraph,
    /// The host does not know yet what the device has decided.
    #[error(
        "state: expected every step's outcome to be known, found {} enqueued and not read; \
         call `settle`",
        counted(*pending, "step")
    )]
    Unsettled {
        /// Steps enqueued since the host last read.
        pending: u64,
    },
    /// A tensor's step count cannot be set so.
    #[error(
        "step of `{name}`: expected at most the state's step {expected}, found {found}; set the state's step first",
        name = Quoted(name)
    )]
    StepAhead { name: String, expected: u64, found: u64 },
}

impl PlanError {
    /// Whether it is one of saving or resuming, which comes on all ranks in the same call and
    /// leaves the run as it was: training may go on.
    pub fn is_of_checkpoint(&self) -> bool {
        matches!(self, Self::Checkpoint { .. } | Self::File(_) | Self::OtherRank { .. })
    }
}
