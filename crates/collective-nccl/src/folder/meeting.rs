//! Meeting in a folder of processes that no launcher has started together.

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::BuildHasher;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fusestep_collective::{MAX_TIMEOUT, mark_joined, require_alone};

use super::FolderControl;
use super::files::{Files, pause};
use crate::NcclError;

/// Name of the file in which rank 0 lists the ranks that have come to this run.
const WELCOME: &str = "welcome";

/// Place of a process among those of its job, and the folder in which they meet.
///
/// ```no_run
/// # #[cfg(feature = "nccl")] {
/// use fusestep_collective::{Collectives, ReduceOp};
/// use fusestep_collective_nccl::{Meeting, NcclCommunicator, NcclOptions};
///
/// // In each of two processes, one with `rank: 0` and one with `rank: 1`; the folder is new for
/// // every run.
/// let meeting = Meeting { rank: 0, world_size: 2, ..Meeting::at("/shared/run-17") };
/// let mut comm = NcclCommunicator::new(Box::new(meeting.join()?), 0, &NcclOptions::default())?;
/// comm.all_reduce(&mut [1.0f32; 8], ReduceOp::Sum)?;
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Meeting {
    /// A folder that all processes see, empty or not there yet; the last one that leaves removes
    /// it.
    pub folder: PathBuf,
    /// Rank of this process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// Time to wait for other ranks, here and in every later call; 60 s by default, a day at most.
    pub timeout: Duration,
}

impl Meeting {
    /// A world of one in `folder`, with the default timeout.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), rank: 0, world_size: 1, timeout: Duration::from_secs(60) }
    }

    /// Waits for the others and returns this process's place among them.
    ///
    /// Every other rank writes a random number of its own, and rank 0 repeats all numbers. So no
    /// file of an earlier run is taken for one of this run. Rank 0 refuses a folder with anything
    /// else in it, and the other ranks refuse a welcome without their number.
    ///
    /// # Errors
    /// [`NcclError::Meeting`]: a folder that is not empty, ranks that expect another world size, a
    /// rank taken twice, ranks that do not come in time, a world of one in a process that a
    /// launcher has started as one of several, or the operating system's text.
    pub fn join(&self) -> Result<FolderControl, NcclError> {
        let met = self.meet();
        let met = met.map_err(|reason| NcclError::Meeting {
            folder: self.folder.clone(),
            rank: self.rank,
            reason,
        })?;
        if self.world_size > 1 {
            mark_joined();
        }
        Ok(met)
    }

    fn meet(&self) -> Result<FolderControl, String> {
        let (rank, world_size) = (self.rank, self.world_size);
        if rank >= world_size {
            return Err(format!(
                "expected a rank below {world_size}, the world size, found {rank}"
            ));
        }
        if world_size == 1 {
            require_alone().map_err(|error| error.to_string())?;
        }
        let timeout = self.timeout.min(MAX_TIMEOUT);
        let as_text = |error: std::io::Error| error.to_string();
        fs::create_dir_all(&self.folder).map_err(as_text)?;
        let folder = fs::canonicalize(&self.folder).map_err(as_text)?;
        let files = Files::new(folder, rank, Vec::new());
        match rank {
            0 => self.welcome(&files, timeout)?,
            _ => self.say_hello(&files, timeout)?,
        }
        Ok(FolderControl::new(files, world_size, timeout))
    }

    /// Rank 0's part: waits for all ranks, checks their world sizes and writes the welcome.
    fn welcome(&self, files: &Files, timeout: Duration) -> Result<(), String> {
        let as_text = |error: std::io::Error| error.to_string();
        for entry in fs::read_dir(&files.folder).map_err(as_text)? {
            let name = entry.map_err(as_text)?.file_name();
            let name = name.to_string_lossy();
            if !name.trim_start_matches('.').starts_with("hello-") {
                return Err(format!(
                    "expected an empty folder, found `{name}` of an earlier run; remove the \
                     folder, or give each run one of its own"
                ));
            }
        }
        let (begun, mut looks) = (Instant::now(), 0);
        let mut numbers: Vec<Option<String>> = vec![None; self.world_size];
        numbers[0] = Some("rank 0".to_owned());
        while numbers.contains(&None) {
            for (rank, heard) in numbers.iter_mut().enumerate().skip(1) {
                let hello = files.read(&format!("hello-{rank}")).map_err(as_text)?;
                let Some(hello) = hello else { continue };
                let hello = String::from_utf8_lossy(&hello).into_owned();
                let (world_size, number) = hello.split_once(' ').unwrap_or(("nothing", ""));
                if world_size != self.world_size.to_string() {
                    let reason = format!(
                        "expected {} ranks as rank 0 does, found {world_size} on rank {rank}; \
                         give all the same number",
                        self.world_size
                    );
                    let told = files.publish(WELCOME, format!("no\n{reason}").as_bytes());
                    return told.map_err(as_text).and(Err(reason));
                }
                *heard = Some(number.to_owned());
            }
            let missing = (0..self.world_size).filter(|&rank| numbers[rank].is_none());
            let missing: Vec<usize> = missing.collect();
            if !missing.is_empty() && begun.elapsed() > timeout {
                return Err(late(&format!("none of ranks {missing:?}"), timeout));
            }
            pause(looks);
            looks += 1;
        }
        let numbers: Vec<String> = numbers.into_iter().flatten().collect();
        let text = format!("yes\n{}", numbers.join("\n"));
        files.publish(WELCOME, text.as_bytes()).map_err(as_text)
    }

    /// Any other rank's part: writes its number and waits for the welcome.
    fn say_hello(&self, files: &Files, timeout: Duration) -> Result<(), String> {
        let as_text = |error: std::io::Error| error.to_string();
        let now = Instant::now();
        let number = RandomState::new().hash_one((std::process::id(), self.rank));
        let number = format!("{number:016x}");
        let hello = format!("{} {number}", self.world_size);
        files.publish(&format!("hello-{}", self.rank), hello.as_bytes()).map_err(as_text)?;
        let mut looks = 0;
        loop {
            if let Some(bytes) = files.read(WELCOME).map_err(as_text)? {
                let text = String::from_utf8_lossy(&bytes);
                return match text.split_once('\n') {
                    Some(("no", reason)) => Err(reason.to_owned()),
                    Some(("yes", numbers)) if numbers.lines().nth(self.rank) == Some(&number) => {
                        Ok(())
                    }
                    _ => Err(format!(
                        "expected rank 0's welcome to this process, found one to another; the \
                         folder is of an earlier run, which is to be removed, or two processes \
                         are rank {}",
                        self.rank
                    )),
                };
            }
            if now.elapsed() > timeout {
                return Err(late("none of rank 0", timeout));
            }
            pause(looks);
            looks += 1;
        }
    }
}

fn late(found: &str, timeout: Duration) -> String {
    format!(
        "expected a word of every rank within {} ms, found {found}; see that all run and see the \
         same folder, or raise the timeout",
        timeout.as_millis()
    )
}
