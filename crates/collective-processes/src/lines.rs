//! Lines that ranks print: passed on with their rank, and kept in a file for each.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::launched::{LaunchOptions, Prefix};

/// How long output is waited for when all processes of a start have ended.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Time between two looks whether all lines are passed on.
const LOOK: Duration = Duration::from_millis(2);

/// Threads that pass lines on.
#[derive(Default)]
pub(crate) struct Lines {
    threads: Vec<JoinHandle<()>>,
}

/// A rank whose output is led somewhere.
pub(crate) struct Led {
    rank: usize,
    log: Option<File>,
}

impl Led {
    /// Leads the output of a rank's command to the places asked for.
    ///
    /// # Errors
    /// A file that cannot be made, by its path.
    pub(crate) fn of(
        command: &mut Command,
        options: &LaunchOptions,
        rank: usize,
    ) -> io::Result<Self> {
        let folder = options.log_folder.as_deref();
        let log = folder.map(|folder| made(folder, rank)).transpose()?;
        match (options.prefix, &log) {
            (Prefix::Rank, _) => {
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            (Prefix::None, Some(log)) => {
                command.stdout(log.try_clone()?).stderr(log.try_clone()?);
            }
            (Prefix::None, None) => {}
        }
        Ok(Self { rank, log })
    }
}

fn made(folder: &Path, rank: usize) -> io::Result<File> {
    let path = folder.join(format!("rank-{rank}.log"));
    let made = File::create(&path);
    made.map_err(|error| {
        io::Error::new(error.kind(), format!("{}: cannot be written: {error}", path.display()))
    })
}

impl Lines {
    /// Passes on what a rank prints from here on, if it is led through this process.
    pub(crate) fn pass_on(&mut self, child: &mut Child, led: Led) -> io::Result<()> {
        let log = Arc::new(Mutex::new(led.log));
        if let Some(out) = child.stdout.take() {
            self.begin(out, io::stdout(), led.rank, Arc::clone(&log))?;
        }
        if let Some(error) = child.stderr.take() {
            self.begin(error, io::stderr(), led.rank, log)?;
        }
        Ok(())
    }

    fn begin(
        &mut self,
        from: impl Read + Send + 'static,
        mut to: impl Write + Send + 'static,
        rank: usize,
        log: Arc<Mutex<Option<File>>>,
    ) -> io::Result<()> {
        let pass_on = move || {
            let mut from = BufReader::new(from);
            let prefix = format!("[rank {rank}] ").into_bytes();
            loop {
                let mut line = prefix.clone();
                // A rank that has ended, or a pipe that is broken, has no more lines.
                let Ok(1..) = from.read_until(b'\n', &mut line) else {
                    return;
                };
                if !line.ends_with(b"\n") {
                    line.push(b'\n');
                }
                // In one piece, since other ranks print, too. A reader that has gone hears nothing
                // more, and the rank goes on.
                let _ = to.write_all(&line).and_then(|()| to.flush());
                if let Some(log) = &mut *log.lock().unwrap_or_else(PoisonError::into_inner) {
                    let _ = log.write_all(&line[prefix.len()..]);
                }
            }
        };
        self.threads.push(Builder::new().name(format!("lines of rank {rank}")).spawn(pass_on)?);
        Ok(())
    }

    /// Waits until all is passed on. Processes that ranks have left may hold their output open, and
    /// are not waited for.
    pub(crate) fn finish(self) {
        let limit = Instant::now() + LAST_LINES;
        while !self.threads.iter().all(JoinHandle::is_finished) && Instant::now() < limit {
            std::thread::sleep(LOOK);
        }
    }
}
