//! One rank's side of a group of GPUs, and the steps of NCCL and the driver that calls are made of.

use std::time::Instant;

use fusestep_collective::{CollectiveError, Communicator, Fingerprint};

use crate::device::UnderWay;
use crate::exchange;
use crate::founding::Site;
use crate::link::{Link, POLLING, Progress};
use crate::options::NcclOptions;

/// Polls between two looks at the clock and at the control communicator.
const POLLS: u32 = 32;

/// One rank's engine in a group of GPUs.
pub(crate) struct Gpus {
    pub(crate) control: Box<dyn Communicator>,
    pub(crate) site: Site,
    pub(crate) link: Link,
    pub(crate) options: NcclOptions,
    /// Fingerprint of the last call, for errors.
    pub(crate) last: Option<Fingerprint>,
    /// Last call on device memory that has returned and was not waited for. Its guard counts the
    /// call as under way.
    pub(crate) enqueued: Option<Enqueued>,
    broken_off: bool,
    pub(crate) closed: Option<CollectiveError>,
}

/// A call that has returned before its data has arrived.
pub(crate) struct Enqueued {
    pub(crate) print: Fingerprint,
    pub(crate) under_way: UnderWay,
}

impl Gpus {
    pub(crate) fn new(
        control: Box<dyn Communicator>,
        site: Site,
        link: Link,
        options: NcclOptions,
    ) -> Self {
        Self {
            control,
            site,
            link,
            options,
            last: None,
            enqueued: None,
            broken_off: false,
            closed: None,
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.control.rank()
    }

    pub(crate) fn world_size(&self) -> usize {
        self.control.world_size()
    }

    /// Waits until everything enqueued so far is done.
    pub(crate) fn finish(&mut self, print: &Fingerprint) -> Result<(), CollectiveError> {
        self.wait(print, Link::enqueued)?;
        self.engine(print, |link| link.mark())?;
        self.wait(print, |link| match link.reached()? {
            Progress::Done => Ok(Progress::Done),
            // A fault of another rank shows here and never at the mark.
            Progress::Waiting => link.enqueued().map(|_| Progress::Waiting),
        })
    }

    /// Waits until NCCL takes more; what is enqueued goes on.
    pub(crate) fn settle(&mut self, print: &Fingerprint) -> Result<(), CollectiveError> {
        self.wait(print, Link::enqueued)
    }

    fn wait(
        &mut self,
        print: &Fingerprint,
        look: impl Fn(&Link) -> Result<Progress, String>,
    ) -> Result<(), CollectiveError> {
        let (begun, mut polls) = (Instant::now(), 0u32);
        loop {
            if self.engine(print, |link| look(link))? == Progress::Done {
                return Ok(());
            }
            polls = polls.wrapping_add(1);
            if !polls.is_multiple_of(POLLS) {
                continue;
            }
            let waited = begun.elapsed();
            POLLING.pause(waited);
            match self.control.failure() {
                // The rank that left had done its part of every call, this one included. Otherwise
                // the error would be another.
                None | Some(CollectiveError::Left { .. }) => {}
                Some(error) => return Err(error),
            }
            if waited > self.options.timeout {
                self.link.handle.abort_in_background(None);
                let timeout = self.options.timeout;
                return Err(exchange::stuck(&mut *self.control, print, timeout));
            }
        }
    }

    /// Makes a step of NCCL or of the driver; its failure is an error of the call.
    pub(crate) fn engine<R>(
        &mut self,
        print: &Fingerprint,
        step: impl FnOnce(&mut Link) -> Result<R, String>,
    ) -> Result<R, CollectiveError> {
        let rank = self.control.rank();
        step(&mut self.link)
            .map_err(|reason| CollectiveError::engine(rank, print.operation.name(), reason))
    }

    /// Closes the group on all ranks, then ends all NCCL communicators of this rank's GPU. Does
    /// nothing the second time.
    pub(crate) fn break_off(&mut self, error: &CollectiveError) {
        if std::mem::replace(&mut self.broken_off, true) {
            return;
        }
        self.control.aborter().close(error.clone());
        // The first error holds.
        let first = self.control.failure();
        let error = first.as_ref().unwrap_or(error);
        self.link.handle.end_all_of_device(error, self.options.timeout);
    }

    /// Closes the group on all ranks after a failed call; returns the group's first error, which
    /// the control communicator knows.
    pub(crate) fn fail(&mut self, error: CollectiveError) -> CollectiveError {
        self.break_off(&error);
        let error = renamed(self.control.failure().unwrap_or(error), self.last.as_ref());
        self.closed.get_or_insert(error).clone()
    }
}

/// Rewrites an error of the control communicator as one of the call `print`.
fn renamed(mut error: CollectiveError, print: Option<&Fingerprint>) -> CollectiveError {
    if let CollectiveError::Late { operation, sequence, bucket, .. } = &mut error
        && let Some(print) = print
    {
        (*operation, *sequence) = (print.operation.name(), print.sequence);
        *bucket = print.context.bucket;
    }
    error
}
