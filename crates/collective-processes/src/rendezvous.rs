//! Rendezvous of processes: rank 0 makes the segment's files, and the others open them. Once all
//! have mapped the files, their names are removed. So nothing is left behind, however the processes
//! end later.

use std::fs::File;
use std::io;

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fusestep_simd::Patience;

use crate::files::{Names, folders, remove_of_dead, segment_name, system};
use crate::layout::{FAILED, LATE, MAGIC, PATH_BYTES, Process, SessionHead, put_bytes, take_bytes};
use crate::life::Life;
use crate::made::{creator, file, map_head};
use crate::once::have_met;
use crate::segment::Segment;
use crate::session::{Session, SessionPlan, life_in, word_of};
use crate::{ProcessError, Rendezvous};

/// Time between two looks for the file that rank 0 makes.
const LOOK: Duration = Duration::from_millis(1);

/// A segment before all have come.
struct Found {
    segment: Segment,
    plan: SessionPlan,
    names: Names,
}

/// Meets the other ranks.
pub(crate) fn join(place: &Rendezvous, timeout: Duration) -> Result<Session, ProcessError> {
    let deadline = Instant::now() + timeout;
    let found = if place.rank == 0 { create(place)? } else { find(place, timeout, deadline)? };
    let came = come(place, &found, timeout, deadline);
    let whole = came.is_ok();
    // The creator takes its names back in any case. Other ranks remove them when it cannot any
    // more.
    if place.rank == 0 || whole || matches!(came, Err(ProcessError::Died { rank: 0 })) {
        found.names.remove();
    }
    came?;
    if place.rank == 0 {
        have_met();
    }
    let Found { segment, plan, .. } = found;
    Ok(Session::new(segment, plan, place.rank))
}

/// Makes the files, complete before another rank can find them.
fn create(place: &Rendezvous) -> Result<Found, ProcessError> {
    let mut plan = SessionPlan::new(place.world_size);
    let name = segment_name(&place.session);
    for folder in folders() {
        remove_of_dead(&folder);
    }
    let own = std::process::id();
    let mut reason = None;
    for folder in folders() {
        let hidden = folder.join(format!("{name}.{own}"));
        let first = match file(&hidden, true) {
            Ok(first) => first,
            Err(error) => {
                reason = Some(system(format!("make {}", hidden.display()), &error));
                continue;
            }
        };
        let mut names = Names::default();
        names.add(&hidden, &first);
        let second = second_file(&name, &mut plan, &mut names);
        let made = fill(first, second, plan);
        let published = made.and_then(|segment| {
            names.publish(&hidden, &folder.join(&name))?;
            Ok(segment)
        });
        match published {
            Ok(segment) => {
                return Ok(Found { segment, plan, names });
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                names.remove();
                return Err(ProcessError::Taken {
                    rank: 0,
                    session: place.session.clone(),
                    process: creator(&folder.join(&name)).map_or(0, |life| life.process),
                });
            }
            Err(error) => {
                names.remove();
                reason = Some(system(format!("share {}", hidden.display()), &error));
            }
        }
    }
    Err(reason.unwrap_or_else(|| system("no folder".to_owned(), &io::Error::other("none"))))
}

/// The file for memory beyond the room in the system's shared memory; without this file there is
/// less room.
fn second_file(name: &str, plan: &mut SessionPlan, names: &mut Names) -> Option<(File, PathBuf)> {
    let path = std::env::temp_dir().join(format!("{name}.{}.2", std::process::id()));
    let made = file(&path, true).and_then(|second| {
        second.set_len(plan.file_bytes()[1])?;
        Ok(second)
    });
    let fits = path.as_os_str().len() <= PATH_BYTES;
    let made = made.ok().filter(|_| fits);
    let Some(second) = made else {
        // No other rank knows the file yet.
        let _ = std::fs::remove_file(&path);
        plan.part_bytes[1] = 0;
        return None;
    };
    names.add(&path, &second);
    Some((second, path))
}

/// Maps new files and writes the words that other ranks look for.
fn fill(first: File, second: Option<(File, PathBuf)>, plan: SessionPlan) -> io::Result<Segment> {
    first.set_len(plan.file_bytes()[0])?;
    let (second, path) = second.unzip();
    let segment = Segment::map(std::iter::once(first).chain(second).collect())?;
    segment.reserve(0, plan.head_bytes())?;
    let head: &SessionHead = segment.at(0);
    let path = path.unwrap_or_default().into_os_string().into_encoded_bytes();
    put_bytes(&head.second, &path);
    head.second_len.store(path.len() as u64, Ordering::SeqCst);
    head.world_size.store(plan.world_size as u64, Ordering::SeqCst);
    for (word, bytes) in head.part_bytes.iter().zip(plan.part_bytes) {
        word.store(bytes, Ordering::SeqCst);
    }
    let processes: &[Process] = segment.list_at(plan.processes(), plan.world_size);
    processes[0].0.store(word_of(Life::own()), Ordering::SeqCst);
    head.magic.store(MAGIC, Ordering::SeqCst);
    Ok(segment)
}

/// Looks for the files until rank 0 has made them.
fn find(place: &Rendezvous, timeout: Duration, deadline: Instant) -> Result<Found, ProcessError> {
    let name = segment_name(&place.session);
    while Instant::now() < deadline {
        for folder in folders() {
            if let Some(found) = open(&folder.join(&name), place)? {
                return Ok(found);
            }
        }
        std::thread::sleep(LOOK);
    }
    Err(ProcessError::Missing {
        ranks: vec![0],
        world_size: place.world_size,
        session: place.session.clone(),
        timeout_ms: timeout.as_millis() as u64,
    })
}

/// Opens the files of a session; `None` if there are none, or only those of a dead process.
fn open(path: &Path, place: &Rendezvous) -> Result<Option<Found>, ProcessError> {
    let first = match file(path, false) {
        Ok(first) => first,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(system(format!("open {}", path.display()), &error)),
    };
    let failed = |error: io::Error| system(format!("map {}", path.display()), &error);
    let mut names = Names::default();
    names.add(path, &first);
    let Some(segment) = map_head(&first).map_err(failed)? else {
        return Ok(None);
    };
    let head: &SessionHead = segment.at(0);
    let load = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::SeqCst);
    if load(&head.world_size) != place.world_size as u64 {
        return Err(ProcessError::WorldSize {
            expected: load(&head.world_size),
            found: place.world_size,
            rank: place.rank,
        });
    }
    let plan = SessionPlan {
        world_size: place.world_size,
        part_bytes: [load(&head.part_bytes[0]), load(&head.part_bytes[1])],
    };
    let creator: &Process = segment.at(plan.processes());
    if !life_in(&creator.0).is_some_and(Life::is_alive) {
        return Ok(None);
    }
    let second = take_bytes(&head.second, load(&head.second_len));
    let mut files = vec![first];
    if !second.is_empty() {
        let path = PathBuf::from(String::from_utf8_lossy(&second).into_owned());
        match file(&path, false) {
            Ok(second) => {
                names.add(&path, &second);
                files.push(second);
            }
            // Rank 0 has just given up, or died; the next look tells.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(system(format!("open {}", path.display()), &error)),
        }
    }
    let segment = Segment::map(files).map_err(failed)?;
    Ok(Some(Found { segment, plan, names }))
}

/// Writes down that this rank has come, and waits for the others.
fn come(
    place: &Rendezvous,
    found: &Found,
    timeout: Duration,
    deadline: Instant,
) -> Result<(), ProcessError> {
    let (rank, ranks) = (place.rank, place.world_size as u64);
    let head: &SessionHead = found.segment.at(0);
    let processes: &[Process] = found.segment.list_at(found.plan.processes(), place.world_size);
    let own = word_of(Life::own());
    let word = &processes[rank].0;
    if let Err(other) = word.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst)
        && rank != 0
    {
        return Err(ProcessError::Taken {
            rank,
            session: place.session.clone(),
            process: other >> 42,
        });
    }
    let missing = || ProcessError::Missing {
        ranks: (0..place.world_size)
            .filter(|&rank| life_in(&processes[rank].0).is_none())
            .collect(),
        world_size: place.world_size,
        session: place.session.clone(),
        timeout_ms: timeout.as_millis() as u64,
    };
    let dead = || {
        let is_dead = |process: &Process| life_in(&process.0).is_some_and(|life| !life.is_alive());
        processes.iter().position(is_dead)
    };
    let arrive = |gate: u64| (gate & FAILED == 0).then(|| gate + 1);
    let (set, get) = (Ordering::SeqCst, Ordering::SeqCst);
    let gate = || head.gate.load(Ordering::SeqCst);
    if head.gate.fetch_update(set, get, arrive).is_ok() {
        head.notifier.notify();
        let over = || gate() & FAILED != 0 || gate() == ranks;
        let patience = Patience::of(usize::MAX);
        head.notifier.wait(patience, deadline, over, || dead().is_some());
        if gate() == ranks {
            return Ok(());
        }
        // The gate closes for all ranks or opens for all, and says why. A rank that hears of it
        // later may find the rank that closed it dead.
        let why = if dead().is_none() { FAILED | LATE } else { FAILED };
        let close = |gate: u64| (gate < ranks).then_some(gate | why);
        if head.gate.fetch_update(set, get, close) == Err(ranks) {
            return Ok(());
        }
        head.notifier.notify();
    }
    let died = dead().filter(|_| gate() & LATE == 0);
    Err(died.map_or_else(missing, |rank| ProcessError::Died { rank }))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_that_is_no_session_s_is_not_mapped_whole() {
        let place = Rendezvous { rank: 1, world_size: 2, session: String::new() };
        let mut file = tempfile::NamedTempFile::new_in(&folders()[0]).unwrap();
        let is_nothing = |file: &tempfile::NamedTempFile| {
            open(file.path(), &place).unwrap().is_none() && creator(file.path()).is_none()
        };
        // A head without the process of rank 0 behind it.
        file.write_all(&[MAGIC.to_le_bytes(), 2u64.to_le_bytes()].concat()).unwrap();
        file.as_file().set_len(size_of::<SessionHead>() as u64).unwrap();
        assert!(is_nothing(&file));
        // More than a process can map.
        file.as_file().set_len(1 << 50).unwrap();
        assert!(is_nothing(&file));
    }
}
