//! The envelope around an engine that only writes down what it is told.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::{
    Aborter, Begun, Blocks, Call, CallOptions, CallState, CollectiveError, Collectives,
    Communicator, Engine, Membership, Operation, Pair, Place, Ranked, ReduceOp, Timeout,
};

/// An engine of rank 1 of 3.
#[derive(Clone, Default)]
struct Scribe {
    told: Arc<Mutex<Vec<String>>>,
    first: Option<CollectiveError>,
}

fn failure(reason: &str) -> CollectiveError {
    CollectiveError::engine(1, "barrier", reason)
}

impl Scribe {
    fn write(&self, what: &str, begun: &Begun<'_>) {
        let Begun { print, operation, timeout, .. } = begun;
        let text = format!("{what} {operation} {} {:?}", print.sequence, print.operation);
        assert_eq!((begun.named().operation, *timeout), (*operation, Duration::from_secs(7)));
        self.told.lock().unwrap().push(text);
    }
}

impl Engine for Scribe {
    fn place(&self) -> Place {
        Place { rank: 1, world_size: 3, begun: Instant::now() }
    }

    fn collective(
        &mut self,
        begun: &mut Begun<'_>,
        call: Call<'_>,
        _blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        self.write("all", begun);
        match call.operation {
            Operation::Barrier => Err(failure("no barriers")),
            _ => Ok(()),
        }
    }

    fn transfer(
        &mut self,
        begun: &mut Begun<'_>,
        pair: Pair,
        _call: Call<'_>,
        _blocks: Blocks<'_>,
    ) -> Result<(), CollectiveError> {
        self.write(&format!("{:?}", pair.ranks()), begun);
        Ok(())
    }

    fn join(
        &mut self,
        begun: &mut Begun<'_>,
        membership: Option<Membership>,
    ) -> Result<Option<Self>, CollectiveError> {
        self.write("join", begun);
        Ok(membership.map(|_| self.clone()))
    }

    fn close(&mut self, error: CollectiveError) -> CollectiveError {
        self.first.get_or_insert(error).clone()
    }

    fn leave(&mut self, last: CollectiveError) {
        self.told.lock().unwrap().push(last.to_string());
    }

    fn aborter(&self) -> Aborter {
        Aborter::new(1, |_| ())
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.first.clone()
    }

    fn carries(&self, operation: Operation) -> Result<(), &'static str> {
        if operation == Operation::AllToAll { Err("expected anything else") } else { Ok(()) }
    }
}

fn ranked(scribe: &Scribe, dump_folder: Option<std::path::PathBuf>) -> Ranked<Scribe> {
    let timeout = Timeout::new(Duration::from_secs(7));
    Ranked::on(scribe.clone(), CallOptions { timeout, recorded_calls: 8, dump_folder })
}

#[test]
fn calls_are_numbered_by_group_and_pair_and_a_transfer_is_compared_as_a_send() {
    let scribe = Scribe::default();
    let mut comm = ranked(&scribe, None);
    let mut word = [1u8];
    comm.all_reduce(&mut word, ReduceOp::Sum).unwrap();
    comm.send(&word, 0).unwrap();
    comm.receive(&mut word, 0).unwrap();
    comm.send(&word, 0).unwrap();
    comm.send(&word, 2).unwrap();
    assert!(comm.split(None).unwrap().is_none());
    drop(comm);
    let told = scribe.told.lock().unwrap();
    let expected = [
        "all all-reduce 1 AllReduce(Sum)",
        "[1, 0] send 1 Send { to: 0 }",
        "[0, 1] receive 1 Send { to: 1 }",
        "[1, 0] send 2 Send { to: 0 }",
        "[1, 2] send 1 Send { to: 2 }",
        "join split 2 Split",
        "rank 1 left the group after 6 calls; all ranks must make the same calls",
    ];
    assert_eq!(*told, expected);
}

#[test]
fn the_first_error_holds_and_refused_calls_are_not_begun() {
    let scribe = Scribe::default();
    let mut comm = ranked(&scribe, None);
    comm.all_to_all(&[1u8; 3], &mut [0; 3]).unwrap_err();
    let first = comm.failure().expect("a call that is refused closes the group");
    assert!(first.to_string().contains("expected anything else"), "{first}");
    assert_eq!(comm.broadcast(&mut [1u8], 3), Err(first.clone()));
    assert_eq!(comm.recorder().calls_begun(), 0);
    assert_eq!(comm.barrier(), Err(first.clone()));
    let states: Vec<CallState> = comm.recorder().calls().map(|call| call.state).collect();
    assert_eq!(states, [CallState::Failed(first.to_string())]);
    assert_eq!(scribe.told.lock().unwrap().len(), 1);
}

#[test]
fn a_group_writes_into_a_folder_of_its_own() {
    let folder = std::env::temp_dir().join(format!("fusestep-ranked-{}", std::process::id()));
    let mut comm = ranked(&Scribe::default(), Some(folder.clone()));
    let membership = Membership { colour: 4, key: 0 };
    let mut group = comm.split(Some(membership)).unwrap().expect("it has a colour");
    group.barrier().unwrap_err();
    let written = group.recorder().dumped().unwrap().as_ref().unwrap();
    assert_eq!(*written, folder.join("group-1-4").join("flight-recorder-rank-1.json"));
    assert!(comm.recorder().dumped().is_none());
    std::fs::remove_dir_all(folder).unwrap();
}
