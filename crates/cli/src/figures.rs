//! Figures of this machine: measured by `check`, and taken by commands that plan for ranks.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use fusestep::{Chosen, Figures, FiguresError, StepOptions, ThreadFigures, WorldFigures};
use fusestep_coalesce::HostMemory;
use fusestep_collective::{Costs, measure};
use fusestep_planner::{Note, Topology, Verdict};
use fusestep_simd::{Level, stream};

use crate::engine::{Engine, Ranks, Watch};
use crate::options::{name_of, pool, threads};

/// Elements of each array that threads stream: more than caches hold.
const STREAMED: usize = 8 << 20;

/// Elements that a stream asks for ahead.
const AHEAD: usize = 256;

/// Times that a stream is taken; the best counts.
const STREAMS: usize = 4;

/// Bytes of an element that is streamed through one array read and three written.
const BYTES_OF_ELEMENT: usize = 28;

/// Ranks between which `check` measures without an engine's name.
const MEASURED_RANKS: usize = 2;

/// The flag of figures.
#[derive(Clone, Debug, Args)]
pub(crate) struct FiguresArgs {
    /// File of a machine's figures, from which settings of calls and threads that are not given are
    /// chosen; `none` for the defaults [default: the file that `fusestep check` keeps]
    #[arg(long = "figures", value_name = "FILE")]
    file: Option<PathBuf>,
}

/// Figures as far as they are known.
pub(crate) struct Known {
    figures: Option<Figures>,
    /// The reason why there are none, where the user has not asked for none.
    unknown: Option<FiguresError>,
}

impl FiguresArgs {
    /// The figures that are given or kept. What is kept and cannot be used is told in the plan.
    ///
    /// # Errors
    /// A given file that has no figures.
    pub(crate) fn known(&self) -> anyhow::Result<Known> {
        let found = match &self.file {
            Some(file) if file.as_os_str() == "none" => Err(FiguresError::Off),
            Some(file) => {
                let given = Figures::read(file);
                return given.map(Known::of).with_context(|| {
                    format!(
                        "--figures {}: expected a file that `fusestep check` has written",
                        file.display()
                    )
                });
            }
            None => Figures::of_this_machine(),
        };
        Ok(match found {
            Ok(figures) => Known::of(figures),
            Err(FiguresError::Off | FiguresError::NoPlace) => {
                Known { figures: None, unknown: None }
            }
            Err(error) => Known { figures: None, unknown: Some(error) },
        })
    }
}

impl Known {
    fn of(figures: Figures) -> Self {
        Self { figures: Some(figures), unknown: None }
    }

    /// The figures, for a backward pass of so many seconds if its length is known.
    pub(crate) fn figures(&self, backward_seconds: f64) -> Option<Figures> {
        let figures = self.figures.clone()?;
        let known = backward_seconds > 0.0;
        Some(if known { figures.with_backward_seconds(backward_seconds) } else { figures })
    }

    /// Says in the plan why ranks have the default buckets, where a choice was possible.
    pub(crate) fn explain(&self, chosen: &mut Chosen, topology: Topology) {
        let StepOptions { bucket_cap_mib, naive, .. } = chosen.options;
        if topology.world == 1 || naive || bucket_cap_mib.is_some() {
            return;
        }
        let Some(unknown) = &self.unknown else {
            return;
        };
        let reason = format!("buckets of the default size: {unknown}");
        chosen.notes.push(Note { pass: "figures".to_owned(), verdict: Verdict::Skipped, reason });
    }

    /// Threads of all ranks together: those asked for, or the fewest that memory is as fast with,
    /// for a `reason` that the plan's notes then name.
    pub(crate) fn threads(
        &self,
        asked: Option<NonZeroUsize>,
        reason: &mut Option<String>,
    ) -> anyhow::Result<NonZeroUsize> {
        let all = threads(asked)?;
        let figures = self.figures.as_ref().filter(|_| asked.is_none());
        let enough = figures.and_then(|figures| NonZeroUsize::new(figures.threads(all.get())?));
        let (Some(figures), Some(enough)) = (figures, enough.filter(|enough| *enough < all)) else {
            return Ok(all);
        };
        *reason = Some(figures.text_of_threads(enough.get(), all.get()));
        Ok(enough)
    }
}

/// Figures of this machine that `check` keeps, and their file.
pub(crate) struct Kept {
    pub(crate) figures: Figures,
    path: PathBuf,
}

impl Kept {
    /// The figures kept so far, to add to; `None` where the user asks for none.
    ///
    /// # Errors
    /// No place for a file.
    pub(crate) fn so_far() -> Option<Result<Self, FiguresError>> {
        match Figures::path() {
            Err(FiguresError::Off) => None,
            Err(error) => Some(Err(error)),
            Ok(path) => {
                let figures = Figures::of_this_machine();
                let figures = figures.unwrap_or_else(|_| Figures::unmeasured());
                Some(Ok(Self { figures, path }))
            }
        }
    }

    /// Adds the costs between the ranks of an engine.
    pub(crate) fn add(&mut self, engine: Engine, topology: Topology, costs: Costs) {
        self.figures.add(WorldFigures {
            engine: name_of(engine),
            ranks: topology.world,
            shares_memory: topology.reach == fusestep_planner::Reach::SharedMemory,
            measured: Figures::today(),
            costs,
        });
    }

    /// Measures calls between ranks that are threads, and memory from all numbers of threads.
    ///
    /// # Cost
    /// About four seconds, and half a GiB.
    pub(crate) fn measure(&mut self) -> anyhow::Result<()> {
        let ranks = Ranks::new(Some(MEASURED_RANKS), Watch::default());
        let engine = Engine::Thread;
        let measured = engine.run(&ranks, |comm| {
            let costs = measure(comm)?;
            Ok::<_, fusestep_collective::CollectiveError>((Topology::of(comm), costs))
        })?;
        let (topology, costs) = measured.context("rank 0 has measured nothing")?;
        self.add(engine, topology, costs);
        self.figures.threads = of_threads(threads(None)?)?;
        self.figures.measured = Figures::today();
        Ok(())
    }

    /// Writes the file; returns a sentence on it.
    ///
    /// # Errors
    /// A file that cannot be written, or figures that are no numbers.
    pub(crate) fn keep(&self) -> Result<String, FiguresError> {
        self.figures.write(&self.path)?;
        Ok(format!(
            "{}: plan, train and bench choose buckets and threads from it",
            self.path.display()
        ))
    }
}

/// Speed of memory from 1, 2, 4, … threads, `all` at most.
fn of_threads(all: NonZeroUsize) -> anyhow::Result<Vec<ThreadFigures>> {
    let level = Level::detect();
    let mut arrays = Vec::with_capacity(4);
    for _ in 0..4 {
        let mut memory = HostMemory::zeroed(STREAMED * size_of::<f32>())?;
        // Written once, because untouched pages would all be the same page of zeros.
        memory.elements_mut::<f32>().fill(1.0);
        arrays.push(memory);
    }
    let doubled = std::iter::successors(Some(1), |threads| Some(threads * 2));
    let mut counts: Vec<usize> = doubled.take_while(|threads| *threads < all.get()).collect();
    counts.push(all.get());
    let mut figures = Vec::with_capacity(counts.len());
    for threads in counts {
        let pool = pool(NonZeroUsize::new(threads))?;
        let mut best = f64::INFINITY;
        for _ in 0..STREAMS {
            let mut lists = arrays.iter_mut().map(HostMemory::elements_mut::<f32>);
            let [read, first, second, third] =
                std::array::from_fn(|_| lists.next().unwrap_or_default());
            let start = Instant::now();
            stream(&pool, level, AHEAD, read, &mut [first, second, third]);
            best = best.min(start.elapsed().as_secs_f64());
        }
        let bytes_per_second = (STREAMED * BYTES_OF_ELEMENT) as f64 / best;
        figures.push(ThreadFigures { threads, bytes_per_second });
    }
    Ok(figures)
}
