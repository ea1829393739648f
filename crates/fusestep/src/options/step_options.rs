//! The table of settings.

use fusestep_amp::LossScale;
use fusestep_launch::Precision;
use fusestep_planner::{
    Accumulated, Averaged, Initial, Interval, Optimizer, Ownership, ReduceDType, ReducedWhen,
    Schedule, TableKind,
};
use fusestep_simd::MAX_THREADS;
use fusestep_tensor::Trust;

use super::OptionError;
use super::conflicts::{GROUPS, ROUNDED_BY_RANK, SENDS_NONE, SLICES, sent_as};
use super::of_params::{OfParams, OwnRule, PrecisionOf};
use super::of_precision::of_precision;
use super::rank_cores::RankCores;
use super::row::{About, Conflict, Field, ListField, Need, Rows, Section, Visit};
use super::text;
use crate::Figures;

/// Every setting of a step, for every face: a new one is a field here and a row in
/// [`StepOptions::each`].
///
/// The default is a step of AdamW with its own defaults. Values are plain; their ranges are
/// checked when a planner is made ([`StepOptions::planner`]).
#[derive(Clone, Debug, PartialEq)]
pub struct StepOptions {
    /// The update rule with its settings. Builders and candle's optimizers put their own here.
    pub rule: Optimizer,
    /// Parameters with a rule of their own.
    pub groups: Vec<OwnRule>,
    /// Substrings of names of parameters without weight decay; with LARS and LAMB the rule says
    /// which rate they take.
    pub exclude: Vec<String>,
    /// Factors on the learning rate of some parameters.
    pub lr_scale: Vec<OfParams<f64>>,
    /// Weight decay of some parameters in place of the rule's.
    pub weight_decay_of: Vec<OfParams<f64>>,
    /// Whether LARS and LAMB scale the rate of some parameters.
    pub trust_of: Vec<OfParams<Trust>>,
    /// Factor on the learning rate at every update.
    pub schedule: Option<Schedule>,
    /// How exactly parameters and state are kept.
    pub precision: Precision,
    /// How exactly parameters of one dtype are kept, in place of `precision`.
    pub precision_of: Vec<PrecisionOf>,
    /// Substrings of names of parameters whose state stays in f32 where others' is kept in int8.
    pub keep_f32: Vec<String>,
    /// Largest norm of all gradients together.
    pub clip_norm: Option<f64>,
    /// Factor on the loss, which the step takes out again.
    pub loss_scale: Option<LossScale>,
    /// Whether the update measures how far each parameter moves.
    pub update_norms: bool,
    /// Micro-steps whose gradients are added before each update.
    pub accumulate: u32,
    /// Use of the gradients of all micro-steps: their mean or their sum.
    pub accumulated: Accumulated,
    /// When ranks add gradients of micro-steps to each other's.
    pub reduced: ReducedWhen,
    /// Lanes of the global batch, along which gradients are added with the same bits at any number
    /// of ranks; in the order of ranks if `None`.
    pub lanes: Option<u32>,
    /// Storage type in which gradients are added up and travel between ranks.
    pub reduce_dtype: ReduceDType,
    /// Memory that ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too; 0 is
    /// nothing.
    pub zero: u8,
    /// Consecutive ranks that share out among themselves; all of them if `None`.
    pub shard_group: Option<usize>,
    /// Ends of shards: at equal lengths or between tensors.
    pub owners: Ownership,
    /// Most MiB of one broadcast of updated parameters, where owners have whole tensors.
    pub broadcast_cap_mib: Option<f64>,
    /// Most MiB of gradients that one call between ranks reduces; 25 if `None`.
    pub bucket_cap_mib: Option<f64>,
    /// Streams on which buckets are reduced while gradients are still being given. If `None`, 2,
    /// and 0 where ranks see each other's memory or average parameters.
    pub comm_streams: Option<usize>,
    /// Whether reduction, update and gather stay apart where they could be one pass.
    pub separate: bool,
    /// Whether buckets are updated while the backward pass runs.
    pub update_in_backward: bool,
    /// Steps between two averages of parameters, in place of gradients reduced every step.
    pub local_sgd: Option<u64>,
    /// Steps at the start that each average.
    pub local_sgd_begin: u64,
    /// Tensors that are averaged.
    pub local_sgd_averaged: Averaged,
    /// Whether the number of steps between averages follows the loss.
    pub local_sgd_interval: Interval,
    /// Parameters of which every rank has a slice of its own.
    pub distributed: Vec<String>,
    /// First values that ranks train.
    pub initial: Initial,
    /// Bytes of arguments of one launch; the backend's limit if `None`.
    pub argument_bytes: Option<usize>,
    /// Place of the tables of a GPU's launches; the plan chooses it by default.
    pub tables: TableKind,
    /// Threads of a rank, the caller's included; all of rayon's pool if `None`.
    pub threads: Option<usize>,
    /// Whether every tensor has a launch and a call of its own: the oracle of all passes.
    pub naive: bool,
    /// Figures of the machine, from which settings of calls and threads that are not set are
    /// chosen; the defaults if `None`. No bit depends on them.
    pub figures: Option<Figures>,
    /// Cores by which rank 0 chooses the communication streams of all ranks, if `comm_streams` is
    /// not set. No bit depends on them.
    pub rank_cores: Option<RankCores>,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self::of(fusestep_fused_adam::Adam::default())
    }
}

impl StepOptions {
    /// A rule, and the defaults of everything else.
    pub fn of(rule: impl Into<Optimizer>) -> Self {
        Self {
            rule: rule.into(),
            groups: Vec::new(),
            exclude: Vec::new(),
            lr_scale: Vec::new(),
            weight_decay_of: Vec::new(),
            trust_of: Vec::new(),
            schedule: None,
            precision: Precision::default(),
            precision_of: Vec::new(),
            keep_f32: Vec::new(),
            clip_norm: None,
            loss_scale: None,
            update_norms: false,
            accumulate: 1,
            accumulated: Accumulated::default(),
            reduced: ReducedWhen::default(),
            lanes: None,
            reduce_dtype: ReduceDType::default(),
            zero: 0,
            shard_group: None,
            owners: Ownership::default(),
            broadcast_cap_mib: None,
            bucket_cap_mib: None,
            comm_streams: None,
            separate: false,
            update_in_backward: false,
            local_sgd: None,
            local_sgd_begin: 0,
            local_sgd_averaged: Averaged::default(),
            local_sgd_interval: Interval::default(),
            distributed: Vec::new(),
            initial: Initial::default(),
            argument_bytes: None,
            tables: TableKind::Auto,
            threads: None,
            naive: false,
            figures: None,
            rank_cores: None,
        }
    }
}

/// Reason of every conflict with an update while the backward pass runs.
const ALL_GRADIENTS_FIRST: &str = "the second has to know all gradients before the first updates \
                                   one bucket";

const IN_BACKWARD: &[Conflict] = &[
    Conflict::of("clip_norm", ALL_GRADIENTS_FIRST),
    Conflict::of("loss_scale", ALL_GRADIENTS_FIRST),
    Conflict::of("update_norms", "the second adds up what the whole step has changed"),
    Conflict::of("reduced", "sums of micro-steps then lie in shards; reduce once per update")
        .on_ranks(),
    Conflict::of("zero", "gathers of layers would come between the updates' calls; use stage 2")
        .at("3")
        .on_ranks(),
];

const NAIVE: &[Conflict] = &[Conflict::of("naive", "the second reduces tensor by tensor")];

const APART: &[Conflict] = &[
    Conflict::of("naive", "the second does everything apart"),
    Conflict::of("comm_streams", "what streams reduce is updated apart in any case").except("0"),
];

const LANES: &[Conflict] = &[
    Conflict::of("local_sgd", "parameters averaged now and then follow the number of ranks"),
    Conflict::of("reduced", "sums of one micro-step over all ranks follow their number")
        .at("per_micro_step"),
    Conflict::of("distributed", "a slice's gradient is of the micro-batches of its rank"),
    sent_as("bf16", ROUNDED_BY_RANK),
    sent_as("f16", ROUNDED_BY_RANK),
];

const LOCAL: &[Conflict] = &[
    Conflict::of("zero", "both decide how gradients are reduced"),
    Conflict::of("reduced", SENDS_NONE),
    // Updates during the backward pass are cut by it, whatever ranks do.
    Conflict::of("bucket_cap_mib", SENDS_NONE).unless("update_in_backward"),
    Conflict::of("comm_streams", SENDS_NONE),
    Conflict::of("separate", SENDS_NONE),
    sent_as("bf16", SENDS_NONE),
    sent_as("f16", SENDS_NONE),
];

const MICRO_STEPS: Need = Need::of("accumulate", "of 2 or more");

const SHARED: Need = Need::of("zero", "of 1 or more");

const AVERAGED: Need = Need::of("local_sgd", "");

/// Most lanes: tables of them are part of every plan.
const MOST_LANES: u64 = 1 << 16;

impl StepOptions {
    /// Visits every setting, in the order of the reference page. A field without a row does not
    /// compile.
    ///
    /// # Errors
    /// The first that `visit` returns.
    pub fn each(&mut self, visit: &mut dyn Visit) -> Result<(), OptionError> {
        // Without `..`, so that the compiler asks for the row of a new field.
        let Self {
            // Rules and the dtypes of precisions have settings of their own in every face.
            rule: _,
            groups: _,
            precision_of: _,
            // Figures are a machine's and no text.
            figures: _,
            rank_cores: _,
            exclude,
            lr_scale,
            weight_decay_of,
            trust_of,
            schedule,
            precision,
            keep_f32,
            clip_norm,
            loss_scale,
            update_norms,
            accumulate,
            accumulated,
            reduced,
            lanes,
            reduce_dtype,
            zero,
            shard_group,
            owners,
            broadcast_cap_mib,
            bucket_cap_mib,
            comm_streams,
            separate,
            update_in_backward,
            local_sgd,
            local_sgd_begin,
            local_sgd_averaged,
            local_sgd_interval,
            distributed,
            initial,
            argument_bytes,
            tables,
            threads,
            naive,
        } = self;
        let rows = &mut Rows { visit, section: Section::Parameters };
        of_params(rows, Patterns { exclude, lr_scale, weight_decay_of, trust_of })?;
        rows.section = Section::Rate;
        rows.told(
            Field { name: "schedule", field: schedule, expected: text::SCHEDULE.into() },
            text::parse_schedule,
            Schedule::to_string,
            "Factor on the learning rate at every update; it follows from the step count.",
        )?;
        of_precision(rows, precision, keep_f32)?;
        of_gradients(rows, Gradients { clip_norm, loss_scale, update_norms })?;
        of_micro_steps(rows, MicroSteps { accumulate, accumulated, reduced, lanes, reduce_dtype })?;
        of_shares(rows, Shares { zero, shard_group, owners, broadcast_cap_mib })?;
        of_calls(rows, Calls { bucket_cap_mib, comm_streams, separate, update_in_backward })?;
        of_averages(
            rows,
            Averages { local_sgd, local_sgd_begin, local_sgd_averaged, local_sgd_interval },
        )?;
        of_start(rows, distributed, initial)?;
        of_launches(rows, Launches { argument_bytes, tables, threads, naive })
    }
}

fn of_start(
    rows: &mut Rows<'_>,
    distributed: &mut Vec<String>,
    initial: &mut Initial,
) -> Result<(), OptionError> {
    rows.section = Section::Start;
    let expected = "a parameter's name";
    let about = About::of_ranks("Parameters of which every rank has a slice of its own.");
    rows.list(
        ListField { name: "distributed", field: distributed, expected },
        text::parse_name,
        String::clone,
        about.conflicts(SLICES),
    )?;
    rows.choice("initial", initial, About::of_ranks("First values that ranks train."))
}

/// Settings of launches and threads.
struct Launches<'a> {
    argument_bytes: &'a mut Option<usize>,
    tables: &'a mut TableKind,
    threads: &'a mut Option<usize>,
    naive: &'a mut bool,
}

fn of_launches(rows: &mut Rows<'_>, of: Launches<'_>) -> Result<(), OptionError> {
    rows.section = Section::Launches;
    rows.count_or_none(
        "argument_bytes",
        of.argument_bytes,
        1..=u64::MAX,
        "Bytes of arguments that one launch may carry.",
    )?;
    rows.choice("tables", of.tables, "Place of the tables of a device's launches.")?;
    let about = "Threads of a rank, the caller's included; no bit depends on them.";
    rows.count_or_none("threads", of.threads, 1..=MAX_THREADS as u64, about)?;
    rows.switch("naive", of.naive, "One launch and one call for each tensor, without any pass.")
}

/// Settings of all gradients of a step.
struct Gradients<'a> {
    clip_norm: &'a mut Option<f64>,
    loss_scale: &'a mut Option<LossScale>,
    update_norms: &'a mut bool,
}

fn of_gradients(rows: &mut Rows<'_>, of: Gradients<'_>) -> Result<(), OptionError> {
    rows.section = Section::Gradients;
    rows.above_0(
        "clip_norm",
        of.clip_norm,
        "Largest norm of all gradients together; larger ones are scaled down to it.",
    )?;
    rows.told(
        Field { name: "loss_scale", field: of.loss_scale, expected: text::LOSS_SCALE.into() },
        text::parse_loss_scale,
        text::loss_scale_text,
        "Factor on the loss, which the step takes out; a step with a gradient that is not \
         finite is skipped.",
    )?;
    rows.switch(
        "update_norms",
        of.update_norms,
        "Measure how far each parameter moves, as the update writes it.",
    )
}

/// Settings of the micro-steps of an update.
struct MicroSteps<'a> {
    accumulate: &'a mut u32,
    accumulated: &'a mut Accumulated,
    reduced: &'a mut ReducedWhen,
    lanes: &'a mut Option<u32>,
    reduce_dtype: &'a mut ReduceDType,
}

fn of_micro_steps(rows: &mut Rows<'_>, of: MicroSteps<'_>) -> Result<(), OptionError> {
    rows.section = Section::MicroSteps;
    let most = 1..=1_000_000;
    rows.count(
        "accumulate",
        of.accumulate,
        most,
        "Micro-steps whose gradients are added before each update.",
    )?;
    let about = About::from("Use of the gradients of all micro-steps.");
    rows.choice("accumulated", of.accumulated, about.needs(MICRO_STEPS))?;
    let about = About::of_ranks("When ranks add gradients of micro-steps to each other's.");
    rows.choice("reduced", of.reduced, about.needs(MICRO_STEPS))?;
    let about = About::from(
        "Lanes of the global batch, along which gradients are added with the same bits at any \
         number of ranks; a lane has as many micro-batches as accumulate says.",
    );
    rows.count_or_none("lanes", of.lanes, 1..=MOST_LANES, about.conflicts(LANES))?;
    let says = "Type in which gradients are added up and travel between ranks.";
    // Sums of 16-bit gradients are f32 on one rank, too, where nothing travels.
    let is_sent_narrower = of.reduce_dtype.wire().is_some();
    let about = if is_sent_narrower { About::of_ranks(says) } else { About::from(says) };
    rows.choice("reduce_dtype", of.reduce_dtype, about)
}

/// Settings of the memory that ranks share out.
struct Shares<'a> {
    zero: &'a mut u8,
    shard_group: &'a mut Option<usize>,
    owners: &'a mut Ownership,
    broadcast_cap_mib: &'a mut Option<f64>,
}

fn of_shares(rows: &mut Rows<'_>, of: Shares<'_>) -> Result<(), OptionError> {
    rows.section = Section::Shares;
    let about =
        "Memory that ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too.";
    rows.count("zero", of.zero, 0..=3, About::of_ranks(about))?;
    let about = About::of_ranks("Consecutive ranks that share out among themselves.");
    let about = about.needs(SHARED).conflicts(GROUPS);
    rows.count_or_none("shard_group", of.shard_group, 1..=u64::MAX, about)?;
    rows.choice("owners", of.owners, About::of_ranks("Ends of shards.").needs(SHARED))?;
    let about = About::of_ranks("Most MiB of one broadcast of parameters that an owner updated.");
    rows.above_0(
        "broadcast_cap_mib",
        of.broadcast_cap_mib,
        about.needs(Need::at("owners", "tensors")),
    )
}

/// Settings of calls between ranks.
struct Calls<'a> {
    bucket_cap_mib: &'a mut Option<f64>,
    comm_streams: &'a mut Option<usize>,
    separate: &'a mut bool,
    update_in_backward: &'a mut bool,
}

fn of_calls(rows: &mut Rows<'_>, of: Calls<'_>) -> Result<(), OptionError> {
    rows.section = Section::Calls;
    let about = About::from(
        "Most MiB of gradients that one call between ranks reduces, and that one process \
         updates at once in backward.",
    );
    let about = about.alone_with("update_in_backward").conflicts(NAIVE);
    rows.above_0("bucket_cap_mib", of.bucket_cap_mib, about)?;
    let about = "Streams on which buckets are reduced while gradients are still being given.";
    rows.count_or_none("comm_streams", of.comm_streams, 0..=64, About::of_ranks(about))?;
    let about = "Reduce, update and gather one after the other where they could be one pass.";
    rows.switch("separate", of.separate, About::of_ranks(about).conflicts(APART))?;
    rows.section = Section::Backward;
    let about = About::from(
        "Update a bucket as soon as its gradients are there; the caller promises to read its \
         parameters no more.",
    );
    rows.switch("update_in_backward", of.update_in_backward, about.conflicts(IN_BACKWARD))
}

/// Settings of averages in place of reductions.
struct Averages<'a> {
    local_sgd: &'a mut Option<u64>,
    local_sgd_begin: &'a mut u64,
    local_sgd_averaged: &'a mut Averaged,
    local_sgd_interval: &'a mut Interval,
}

fn of_averages(rows: &mut Rows<'_>, of: Averages<'_>) -> Result<(), OptionError> {
    rows.section = Section::Averages;
    let about = About::of_ranks(
        "Steps between two averages of parameters, in place of gradients reduced every step.",
    );
    rows.count_or_none("local_sgd", of.local_sgd, 1..=u64::MAX, about.conflicts(LOCAL))?;
    let about = About::of_ranks("Steps at the start that each average.");
    rows.count("local_sgd_begin", of.local_sgd_begin, 0..=u64::MAX, about.needs(AVERAGED))?;
    let about = About::of_ranks("Tensors that are averaged.").needs(AVERAGED);
    rows.choice("local_sgd_averaged", of.local_sgd_averaged, about)?;
    let about = About::of_ranks("Whether the number of steps between averages follows the loss.");
    rows.choice("local_sgd_interval", of.local_sgd_interval, about.needs(AVERAGED))
}

/// Settings of parameters whose names contain a pattern.
struct Patterns<'a> {
    exclude: &'a mut Vec<String>,
    lr_scale: &'a mut Vec<OfParams<f64>>,
    weight_decay_of: &'a mut Vec<OfParams<f64>>,
    trust_of: &'a mut Vec<OfParams<Trust>>,
}

fn of_params(rows: &mut Rows<'_>, of: Patterns<'_>) -> Result<(), OptionError> {
    rows.list(
        ListField { name: "exclude", field: of.exclude, expected: "a part of a parameter's name" },
        text::parse_name,
        String::clone,
        "Part of the names of parameters without weight decay.",
    )?;
    let expected = "SUBSTRING=NUMBER, with a finite number of at least 0";
    rows.list(
        ListField { name: "lr_scale", field: of.lr_scale, expected },
        text::parse_number_of,
        text::number_of_text,
        "Factor on the learning rate of parameters whose names contain the substring.",
    )?;
    rows.list(
        ListField { name: "weight_decay_of", field: of.weight_decay_of, expected },
        text::parse_number_of,
        text::number_of_text,
        "Weight decay of parameters whose names contain the substring, in place of the rule's.",
    )?;
    let expected = "SUBSTRING=ratio or SUBSTRING=plain";
    rows.list(
        ListField { name: "trust_of", field: of.trust_of, expected },
        text::parse_trust_of,
        text::trust_of_text,
        "Whether LARS and LAMB scale the rate of parameters whose names contain the substring.",
    )
}
