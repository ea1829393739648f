//! Starts this program as ranks, watched from outside.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Whether this process is a rank that another one has started.
pub(crate) fn is_rank() -> bool {
    std::env::var_os("FUSESTEP_SESSION").is_some()
}

/// A session of this test alone.
pub(crate) fn session(name: &str) -> String {
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    let number = STARTED.fetch_add(1, Ordering::SeqCst);
    format!("{name} {} {number}", std::process::id())
}

/// How a rank has ended.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) is_success: bool,
    pub(crate) output: String,
}

/// Processes that are ended with this value.
pub(crate) struct Started(pub(crate) Vec<Child>);

/// Starts rank `rank` of a session.
pub(crate) fn rank(
    rank: usize,
    ranks: usize,
    session: &str,
    arguments: &[&str],
    environment: &[(&str, &str)],
) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(arguments)
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", ranks.to_string())
        .env("FUSESTEP_SESSION", session)
        .env_remove("LOCAL_WORLD_SIZE")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Starts all ranks of a session.
pub(crate) fn ranks(
    ranks: usize,
    session: &str,
    arguments: &[&str],
    environment: &[(&str, &str)],
) -> Started {
    let start = |number| rank(number, ranks, session, arguments, environment);
    Started((0..ranks).map(start).collect())
}

impl Started {
    /// Waits for all; what still runs after `limit` is ended and failed.
    pub(crate) fn wait(&mut self, limit: Duration) -> Vec<End> {
        let deadline = Instant::now() + limit;
        let readers: Vec<_> = self
            .0
            .iter_mut()
            .map(|child| {
                let pipes: [Box<dyn Read + Send>; 2] = [
                    Box::new(child.stdout.take().unwrap()),
                    Box::new(child.stderr.take().unwrap()),
                ];
                pipes.map(|mut pipe| {
                    std::thread::spawn(move || {
                        let mut bytes = Vec::new();
                        // What could be read up to an error is what there is.
                        let _ = pipe.read_to_end(&mut bytes);
                        String::from_utf8_lossy(&bytes).into_owned()
                    })
                })
            })
            .collect();
        let mut ends = Vec::new();
        for (child, readers) in self.0.iter_mut().zip(readers) {
            let mut status = child.try_wait().unwrap();
            while status.is_none() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
                status = child.try_wait().unwrap();
            }
            if status.is_none() {
                child.kill().unwrap();
                child.wait().unwrap();
            }
            let output = readers.map(|reader| reader.join().unwrap()).concat();
            let is_success = status.is_some_and(|status| status.success());
            ends.push(End { is_success, output });
        }
        ends
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Most have ended by themselves.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Files of sessions that this program has started and that have lost their ranks.
pub(crate) fn left_behind() -> Vec<String> {
    let found = std::fs::read_dir("/dev/shm").unwrap();
    let names = found.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("fusestep-")).collect();
    // Other tests may be about to start, and ranks of a launcher that a test has killed see so at
    // their next look: only what stays was left.
    let until = Instant::now() + Duration::from_secs(10);
    while !names.is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(100));
        names.retain(|name| std::path::Path::new("/dev/shm").join(name).exists());
    }
    names
}
