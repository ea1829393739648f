//! Curves of a run, for its page: means of a few updates each, so that a page stays small however
//! long the run is.

use anyhow::Context;
use fusestep::StageSeconds;
use fusestep_collective::{Collectives, Communicator, ReduceOp};

use super::told::StepLine;

/// Most points of a curve; beyond them two become one.
const MOST: usize = 512;

/// Names of the values that are the same on all ranks.
const OF_RUN: [&str; 6] =
    ["loss", "learning rate", "gradient norm", "update norm", "loss scale", "share skipped"];

/// Seconds of a rank: of a whole batch, of the model's passes, and of each part of a step.
pub(crate) const TIMES: usize = 2 + PARTS;
const PARTS: usize = 10;

/// Names of the seconds of a rank.
pub(crate) fn names_of_times() -> [&'static str; TIMES] {
    let mut names = ["batch", "model", "", "", "", "", "", "", "", "", "", ""];
    for (at, (name, _)) in StageSeconds::default().parts().into_iter().enumerate() {
        names[2 + at] = name;
    }
    names
}

/// A sum of values, and their number.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        if value.is_finite() {
            (self.sum, self.count) = (self.sum + value, self.count + 1.0);
        }
    }

    fn with(self, other: Self) -> Self {
        Self { sum: self.sum + other.sum, count: self.count + other.count }
    }

    /// The mean; NaN of nothing, which curves leave out.
    fn value(self) -> f64 {
        self.sum / self.count
    }
}

/// Some updates, one after the other.
#[derive(Clone, Debug)]
struct Bin {
    updates: u64,
    of_run: [Mean; OF_RUN.len()],
    times: [Mean; TIMES],
    /// Distance that each tensor moved.
    tensors: Vec<Mean>,
}

/// Curves of one rank while the run goes on. All ranks have the same updates in each point.
#[derive(Debug)]
pub(crate) struct Curves {
    /// Updates before the first.
    first: u64,
    /// Updates of a point.
    of_bin: u64,
    bins: Vec<Bin>,
}

impl Curves {
    pub(crate) fn from(first: u64) -> Self {
        Self { first, of_bin: 1, bins: Vec::new() }
    }

    /// Adds an update.
    pub(crate) fn add(&mut self, line: &StepLine<'_>) {
        let report = &line.report;
        let of_run = [
            report.loss,
            Some(report.lr),
            report.grad_norm,
            report.update_norm,
            report.loss_scale,
            Some(report.skipped.into()),
        ];
        let parts = report.seconds.unwrap_or_default().parts();
        let times = [line.batch_seconds, line.model_seconds].into_iter();
        let times = times.chain(parts.into_iter().map(|(_, seconds)| seconds));
        let norms = line.update_norms.as_ref().map_or(&[][..], |norms| &norms.norms);
        if self.bins.last().is_none_or(|bin| bin.updates == self.of_bin) {
            if self.bins.len() == MOST {
                self.halve();
            }
            self.bins.push(Bin {
                updates: 0,
                of_run: Default::default(),
                times: Default::default(),
                tensors: vec![Mean::default(); norms.len()],
            });
        }
        let Some(bin) = self.bins.last_mut() else { return };
        bin.updates += 1;
        bin.of_run.iter_mut().zip(of_run).for_each(|(mean, value)| {
            value.into_iter().for_each(|value| mean.add(value));
        });
        bin.times.iter_mut().zip(times).for_each(|(mean, value)| mean.add(value));
        bin.tensors.iter_mut().zip(norms).for_each(|(mean, value)| mean.add(*value));
    }

    /// Makes one point of every two.
    fn halve(&mut self) {
        self.of_bin *= 2;
        let halved = self.bins.chunks(2).map(|pair| {
            let mut bin = pair[0].clone();
            for other in &pair[1..] {
                bin.updates += other.updates;
                each(&mut bin.of_run, &other.of_run);
                each(&mut bin.times, &other.times);
                each(&mut bin.tensors, &other.tensors);
            }
            bin
        });
        self.bins = halved.collect();
    }

    /// The curves of all ranks; all ranks call it together.
    ///
    /// # Errors
    /// A call that fails.
    pub(crate) fn gather(
        &self,
        names: &[&str],
        comm: &mut dyn Communicator,
    ) -> anyhow::Result<Drawn> {
        let mut times = self.times(comm.rank(), comm.world_size());
        comm.all_reduce(&mut times, ReduceOp::Sum).context("--report: times of all ranks")?;
        Ok(self.drawn(names, &times))
    }

    /// The curves of this rank alone, where no other rank can be asked any more.
    pub(crate) fn alone(&self, names: &[&str]) -> Drawn {
        self.drawn(names, &self.times(0, 1))
    }

    /// Times of `world` ranks, of which this one is `rank`: zeros are those of the others.
    fn times(&self, rank: usize, world: usize) -> Vec<f64> {
        let points = self.bins.len();
        let mut times = vec![0.0; world * points * TIMES];
        let own = times.chunks_exact_mut(TIMES).skip(rank * points);
        for (own, bin) in own.zip(&self.bins) {
            own.iter_mut().zip(bin.times).for_each(|(own, mean)| *own = mean.value());
        }
        times
    }

    /// The curves, with the times of each rank.
    fn drawn(&self, names: &[&str], times: &[f64]) -> Drawn {
        let points = self.bins.len();
        let world = times.len() / (points * TIMES).max(1);
        let mut done = self.first;
        let updates = self.bins.iter().map(|bin| {
            done += bin.updates;
            done as f64
        });
        let means = |of: &dyn Fn(&Bin) -> Mean| -> Vec<f64> {
            self.bins.iter().map(|bin| of(bin).value()).collect()
        };
        let of_run = OF_RUN.iter().enumerate();
        let of_run = of_run.map(|(at, name)| Curve::of(name, means(&|bin| bin.of_run[at])));
        let measured = self.bins.first().map_or(0, |bin| bin.tensors.len());
        let tensors = names.iter().take(measured).enumerate();
        let tensors = tensors.map(|(at, name)| Curve::of(name, means(&|bin| bin.tensors[at])));
        let of_rank = |rank: usize| -> Vec<Curve> {
            let names = names_of_times().into_iter().enumerate();
            let curves = names.map(|(time, name)| {
                let at = |point: usize| times[(rank * points + point) * TIMES + time];
                Curve::of(name, (0..points).map(at).collect())
            });
            curves.collect()
        };
        Drawn {
            updates: updates.collect(),
            of_point: self.of_bin,
            of_run: of_run.filter(Curve::is_known).collect(),
            tensors: tensors.filter(Curve::is_known).collect(),
            ranks: (0..world).map(of_rank).collect(),
        }
    }
}

fn each(own: &mut [Mean], others: &[Mean]) {
    own.iter_mut().zip(others).for_each(|(own, other)| *own = own.with(*other));
}

/// A curve with its name; NaN where nothing is known.
#[derive(Clone, Debug)]
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) values: Vec<f64>,
}

impl Curve {
    pub(crate) fn of(name: &str, values: Vec<f64>) -> Self {
        Self { name: name.to_owned(), values }
    }

    fn is_known(&self) -> bool {
        self.values.iter().any(|value| value.is_finite())
    }

    /// The mean of what is known; 0 of nothing.
    pub(crate) fn mean(&self) -> f64 {
        let mut mean = Mean::default();
        self.values.iter().for_each(|value| mean.add(*value));
        mean.sum / mean.count.max(1.0)
    }
}

/// Curves of a run that is over.
#[derive(Clone, Debug, Default)]
pub(crate) struct Drawn {
    /// Number of the last update of each point.
    pub(crate) updates: Vec<f64>,
    /// Updates of a point.
    pub(crate) of_point: u64,
    /// Loss, rate and norms, as far as they are known.
    pub(crate) of_run: Vec<Curve>,
    /// Distances that tensors moved, if they were asked for.
    pub(crate) tensors: Vec<Curve>,
    /// Seconds of each rank, named as [`names_of_times`] has them.
    pub(crate) ranks: Vec<Vec<Curve>>,
}

#[cfg(test)]
mod tests {
    use fusestep::Report;
    use fusestep_collective::Solo;

    use super::*;

    #[test]
    fn long_runs_have_few_points_and_the_same_means() {
        let mut curves = Curves::from(100);
        let updates = 3 * MOST + 1;
        for at in 0..updates {
            let report = Report { loss: Some(at as f64), ..Report::default() };
            let mut line = StepLine::new(0, 1, report);
            line.model_seconds = 0.5;
            curves.add(&line);
        }
        let drawn = curves.gather(&[], &mut Solo::new()).unwrap();
        assert_eq!(drawn.updates.len(), (updates as f64 / 4.0).ceil() as usize);
        assert_eq!(drawn.updates.last(), Some(&((100 + updates) as f64)));
        assert_eq!((drawn.updates[0], drawn.of_run[0].values[0]), (104.0, 1.5));
        assert_eq!(drawn.of_run[0].name, "loss");
        // Nothing was clipped or scaled.
        assert_eq!(drawn.of_run.len(), 3);
        assert!(drawn.ranks[0][1].values.iter().all(|seconds| *seconds == 0.5));
        assert_eq!(drawn.ranks[0][1].name, "model");
        assert!(names_of_times().iter().all(|name| !name.is_empty()));
    }

    #[test]
    fn a_run_without_updates_has_no_curves() {
        let drawn = Curves::from(7).gather(&["a"], &mut Solo::new()).unwrap();
        assert!(drawn.updates.is_empty() && drawn.of_run.is_empty() && drawn.tensors.is_empty());
    }
}
