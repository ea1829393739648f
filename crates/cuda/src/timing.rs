//! Time on the device's own clock.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use fusestep_launch::{BackendError, Memory};

use crate::backend::CudaBackend;
use crate::event::{Event, EventUse};

/// The time of steps that were enqueued one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTime {
    /// The number of steps.
    pub steps: NonZeroU32,
    /// Time from the first step's start to the last one's end by the device's clock, gaps in which
    /// it waited for the host included.
    pub device: Duration,
    /// Time from before the first step was enqueued until the host has seen the last one's end.
    pub wall: Duration,
}

impl DeviceTime {
    /// Nanoseconds of a step by the device's clock.
    pub fn device_ns(&self) -> f64 {
        self.device.as_secs_f64() * 1e9 / f64::from(self.steps.get())
    }

    /// Nanoseconds of a step by the host's clock.
    pub fn wall_ns(&self) -> f64 {
        self.wall.as_secs_f64() * 1e9 / f64::from(self.steps.get())
    }
}

impl CudaBackend {
    /// Runs `step` as often as `steps` says, and returns the time of all runs by the device's and
    /// the host's clocks.
    ///
    /// `step` enqueues work on this backend and gets the number of its run, from 0. The call waits
    /// for earlier work first, and at the end for the last run's work. If `step` waits for the
    /// device, the time includes that wait.
    ///
    /// # Errors
    /// The first error of `step`, which is not run again then. [`BackendError::Device`] with the
    /// driver's code.
    pub fn timed<E: From<BackendError>>(
        &self,
        steps: NonZeroU32,
        step: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<DeviceTime, E> {
        self.synchronize()?;
        let event = || Event::new(&self.session, EventUse::Time);
        // SAFETY: the session's stream lives as long as it.
        let mark = |event: &Event| unsafe { event.record(self.session.stream()) };
        let (start, end) = (event()?, event()?);
        let begun = Instant::now();
        mark(&start)?;
        for index in 0..steps.get() {
            step(index)?;
        }
        mark(&end)?;
        self.synchronize()?;
        let wall = begun.elapsed();
        let milliseconds = end.since(&start)?;
        Ok(DeviceTime {
            steps,
            device: Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3),
            wall,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shared_out_among_the_steps() {
        let time = DeviceTime {
            steps: NonZeroU32::new(4).unwrap(),
            device: Duration::from_micros(2),
            wall: Duration::from_micros(10),
        };
        assert!((time.device_ns() - 500.0).abs() < 1e-6);
        assert!((time.wall_ns() - 2500.0).abs() < 1e-6);
    }
}
