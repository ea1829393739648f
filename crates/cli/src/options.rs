//! Flags that several subcommands share, spelled the same in each.

use std::num::NonZeroUsize;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use fusestep::SharedBackend;
use fusestep_cpu::CpuBackend;
use fusestep_simd::{MAX_THREADS, Pool, start_workers};
use fusestep_tensor::{DType, Quoted};
use rayon::ThreadPoolBuilder;

use crate::settings::{Settings, Step};

/// Most ranks that are run as threads or processes of one machine.
pub(crate) const MOST_RANKS: u64 = 1_024;

/// Longest time that ranks wait for each other.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// The name that a flag's value has on the command line.
pub(crate) fn name_of(value: impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Reads a number from `LEAST` to `MOST`, and names both otherwise.
pub(crate) fn whole<T: FromStr, const LEAST: u64, const MOST: u64>(
    text: &str,
) -> Result<T, String> {
    let number = text.parse::<u64>().ok();
    let number = number.filter(|number| (LEAST..=MOST).contains(number));
    number
        .and_then(|_| text.parse().ok())
        .ok_or_else(|| format!("expected a number from {LEAST} to {MOST}"))
}

/// Reads any number.
pub(crate) fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "expected a number such as 0.001".to_owned())
}

/// Seconds above zero, a day at most.
pub(crate) fn parse_timeout(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok();
    let timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    timeout
        .filter(|timeout| !timeout.is_zero() && *timeout <= LONGEST_TIMEOUT)
        .ok_or_else(|| format!("expected seconds above 0, {} at most", LONGEST_TIMEOUT.as_secs()))
}

/// Reads one of the values by its name; the texts are for `--help`.
pub(crate) fn named<T: Copy + Send + Sync + 'static, const N: usize>(
    values: [(&'static str, T, &'static str); N],
) -> impl TypedValueParser<Value = T> {
    let names = values.map(|(name, _, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(names).try_map(move |given| {
        let found = values.iter().find(|(name, ..)| *name == given);
        found.map(|(_, value, _)| *value).ok_or("no such value")
    })
}

/// Backend that a step runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendName {
    /// Host memory, SIMD and threads
    Cpu,
    /// A CUDA device
    Cuda,
}

impl BackendName {
    /// Refuses a backend that this build leaves out.
    pub(crate) fn is_built(self) -> anyhow::Result<()> {
        match self {
            #[cfg(not(feature = "cuda"))]
            BackendName::Cuda => anyhow::bail!(NO_CUDA),
            _ => Ok(()),
        }
    }

    /// Refuses a number of threads on a backend whose steps run on none.
    pub(crate) fn require_threads(self, asked: Option<NonZeroUsize>) -> anyhow::Result<()> {
        ensure!(
            self == BackendName::Cpu || asked.is_none(),
            "--threads: expected --backend cpu, found cuda, whose steps run on a device"
        );
        Ok(())
    }

    /// The backend of one rank: on the cpu with this many threads, or on the GPU that its engine
    /// gives it.
    pub(crate) fn of_rank(self, threads: usize, gpu: Option<u32>) -> anyhow::Result<SharedBackend> {
        Ok(match self {
            BackendName::Cpu => {
                let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
                Arc::new(CpuBackend::new(threads))
            }
            BackendName::Cuda => cuda(gpu.unwrap_or(0), None)?,
        })
    }
}

/// Flags of the backend that a step runs on.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct BackendArgs {
    /// Backend that the step runs on
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) backend: BackendName,
    /// Threads of the cpu backend, 256 at most [default: RAYON_NUM_THREADS, which is held to the
    /// same; all processors if it is not set, empty or 0]
    #[arg(long, value_parser = parse_threads)]
    pub(crate) threads: Option<NonZeroUsize>,
}

impl BackendArgs {
    /// The backend with the limits asked for, or why there is none.
    pub(crate) fn open(&self, settings: &Settings<Step>) -> anyhow::Result<SharedBackend> {
        self.backend.require_threads(self.threads)?;
        match self.backend {
            BackendName::Cpu => {
                let cpu = CpuBackend::in_pool(pool(self.threads)?);
                Ok(Arc::new(cpu.with_limits(settings.limits())))
            }
            BackendName::Cuda => cuda(0, settings.argument_bytes()),
        }
    }
}

/// The error of a build without CUDA.
#[cfg(not(feature = "cuda"))]
pub(crate) const NO_CUDA: &str = "cuda: device 0 cannot be opened: this build leaves CUDA out; \
                                  build it with `cargo install --path crates/cli --features cuda` \
                                  (it takes a libcuda.so.1), or use the cpu backend";

#[cfg(not(feature = "cuda"))]
fn cuda(_: u32, _: Option<usize>) -> anyhow::Result<SharedBackend> {
    anyhow::bail!(NO_CUDA)
}

/// A device, with the limit that was asked for, if the device has as much.
#[cfg(feature = "cuda")]
fn cuda(index: u32, argument_bytes: Option<usize>) -> anyhow::Result<SharedBackend> {
    let cuda = fusestep_cuda::CudaBackend::open(index)?;
    let most = fusestep_launch::Memory::limits(&cuda);
    let argument_bytes = argument_bytes.unwrap_or(most.argument_bytes);
    anyhow::ensure!(
        argument_bytes <= most.argument_bytes,
        "--argument-bytes: expected at most {} on this device, found {argument_bytes}",
        most.argument_bytes
    );
    let limits = fusestep_launch::LaunchLimits { argument_bytes, ..most };
    Ok(Arc::new(cuda.with_limits(limits)))
}

/// Reads a number of threads that a pool can have.
pub(crate) fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    let threads = text.parse::<NonZeroUsize>().ok();
    threads
        .filter(|threads| threads.get() <= MAX_THREADS)
        .ok_or_else(|| format!("expected a number of threads from 1 to {MAX_THREADS}"))
}

/// Variables in which rayon looks for its pool's threads, one after the other.
const RAYON: [&str; 2] = ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"];

/// Refuses numbers of threads in the environment that --threads would refuse. Rayon takes any
/// number and starts as many threads, and ignores text that is no number.
pub(crate) fn require_threads_of_environment() -> anyhow::Result<()> {
    for variable in RAYON {
        let Some(value) = std::env::var_os(variable) else {
            continue;
        };
        let value = value.to_string_lossy();
        // As rayon documents it, 0 stands for as many threads as there are processors; so does an
        // empty text.
        ensure!(
            matches!(&*value, "" | "0") || parse_threads(&value).is_ok(),
            "{variable}: expected a number of threads from 1 to {MAX_THREADS}, or 0 for all \
             processors, found `{}`",
            Quoted(&value)
        );
    }
    Ok(())
}

/// Remedies where the system gives no more threads.
const FEWER_THREADS: &str = "use --threads 1 and one rank, set RAYON_NUM_THREADS to fewer, or \
                             allow more processes (ulimit -u, a container's limit on pids)";

/// Number of threads of rayon's pool, which runs from here on.
fn all_threads() -> anyhow::Result<usize> {
    let started = start_workers();
    started.map_err(|error| {
        anyhow!(
            "expected a thread for each processor, found that the system starts fewer ({error}); \
             {FEWER_THREADS}"
        )
    })?;
    Ok(rayon::current_num_threads())
}

/// The threads that were asked for, otherwise as many as rayon's pool has.
pub(crate) fn threads(asked: Option<NonZeroUsize>) -> anyhow::Result<NonZeroUsize> {
    let all = || all_threads().map(|all| NonZeroUsize::new(all).unwrap_or(NonZeroUsize::MIN));
    asked.map_or_else(all, Ok)
}

/// A pool of the threads that were asked for: those of rayon's pool, or of a pool of its own if
/// more are asked for. One thread is the caller's, and no other is started.
pub(crate) fn pool(asked: Option<NonZeroUsize>) -> anyhow::Result<Pool> {
    let threads = threads(asked)?;
    if threads == NonZeroUsize::MIN || threads.get() <= all_threads()? {
        return Ok(Pool::new(threads));
    }
    let own = ThreadPoolBuilder::new().num_threads(threads.get()).build();
    let own = own.map_err(|error| {
        anyhow!(
            "--threads: expected {threads} threads, found that the system starts fewer ({error}); \
             {FEWER_THREADS}"
        )
    })?;
    Ok(Pool::of(Arc::new(own)))
}

/// Starts the threads that models compute with. Where --threads asks for one thread and the system
/// gives no more, the caller's thread takes their place.
pub(crate) fn start_compute_threads(asked: Option<NonZeroUsize>) -> anyhow::Result<()> {
    if asked == Some(NonZeroUsize::MIN) && !can_start_threads() {
        let own = ThreadPoolBuilder::new().num_threads(1).use_current_thread();
        return own.build_global().context("--threads");
    }
    all_threads().map(|_| ())
}

/// Requires that candle can start the threads that some of its work has of its own, since it would
/// panic otherwise.
pub(crate) fn require_candle_threads() -> anyhow::Result<()> {
    let told = |name| std::env::var(name).ok()?.parse::<usize>().ok().filter(|&n| n > 0);
    let told = told("CANDLE_NUM_THREADS").or_else(|| told("RAYON_NUM_THREADS"));
    ensure!(
        told == Some(1) || can_start_threads(),
        "expected a thread of candle's for each processor, found that the system starts fewer; set \
         RAYON_NUM_THREADS=1, or allow more processes (ulimit -u, a container's limit on pids)"
    );
    Ok(())
}

/// Whether the system gives as many threads as rayon's pool would have.
fn can_start_threads() -> bool {
    let told = RAYON.iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
    let all = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let wanted = told.filter(|&threads| threads > 0).unwrap_or(all);
    // All threads run at once, as in a pool: none ends before the last was started.
    let hold = Mutex::new(());
    let held = hold.lock();
    std::thread::scope(|scope| {
        let wait = || drop(hold.lock());
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, wait).is_ok();
        let all_started = (0..wanted).all(start);
        drop(held);
        all_started
    })
}

/// Reads an element type that parameters can have.
pub(crate) fn param_dtype() -> impl TypedValueParser<Value = DType> {
    named([
        ("f32", DType::F32, "IEEE 754 binary32"),
        ("f64", DType::F64, "IEEE 754 binary64"),
        ("f16", DType::F16, "IEEE 754 binary16"),
        ("bf16", DType::BF16, "The upper half of a binary32"),
    ])
}
