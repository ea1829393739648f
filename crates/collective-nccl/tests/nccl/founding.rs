//! What can be wrong before there is a communicator.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use fusestep_collective::{
    Collectives, Communicator, Membership, Options, ReduceOp, Solo, run_ranks,
};
use fusestep_collective_nccl::{Meeting, NcclCommunicator, NcclError, NcclOptions};

use super::worlds::{options, sizes, turn};

fn alone(options: &NcclOptions) -> NcclError {
    NcclCommunicator::new(Box::new(Solo::new()), 0, options).unwrap_err()
}

/// Makes a group whose ranks ask for these GPUs, with options of their own.
fn errors(gpus: &[usize], own: impl Fn(usize) -> NcclOptions + Sync) -> Vec<Option<NcclError>> {
    let control = Options { timeout: Duration::from_secs(20), ..Options::default() };
    let start = Instant::now();
    let outcomes = run_ranks(gpus.len(), &control, |control| {
        let rank = control.rank();
        NcclCommunicator::new(Box::new(control), gpus[rank], &own(rank)).err()
    });
    let errors = outcomes.unwrap().into_iter().map(Result::unwrap).collect();
    assert!(start.elapsed() < control.timeout, "found at the deadline only");
    errors
}

#[test]
fn a_missing_library_says_which_and_what_would_work() {
    let _turn = turn();
    for (nccl, driver) in [("/nowhere/libnccl.so.2", None), ("", Some("/nowhere/libcuda.so.1"))] {
        let mut options = options();
        match driver {
            Some(path) => options.driver_library = path.into(),
            None => options.nccl_library = nccl.into(),
        }
        let text = alone(&options).to_string();
        let path = driver.unwrap_or(nccl);
        assert!(
            text.starts_with(&format!(
                "nccl: expected the library {path}, found none that loads ("
            )) && text.contains("; install "),
            "{text}"
        );
    }
}

#[test]
fn an_old_library_and_one_that_lacks_a_function_are_refused() {
    let _turn = turn();
    let variant = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let (Some(old), Some(lacking)) =
        (variant("FUSESTEP_NCCL_OLD_LIBRARY"), variant("FUSESTEP_NCCL_LACKING_LIBRARY"))
    else {
        eprintln!("skipped: no such libraries but those of `cargo xtask nccl`");
        return;
    };
    let with =
        |nccl_library: &PathBuf| NcclOptions { nccl_library: nccl_library.clone(), ..options() };
    let text = alone(&with(&old)).to_string();
    assert!(text.starts_with("nccl: expected NCCL 2.14.0 or newer, found 2.10.3 in"), "{text}");
    let text = alone(&with(&lacking)).to_string();
    assert!(text.starts_with("nccl: expected `ncclCommInitRankConfig` in"), "{text}");
    if sizes().len() < 2 {
        return;
    }
    // One rank's trouble is told to all.
    let found = errors(&[0, 1], |rank| match rank {
        1 => with(&old),
        _ => options(),
    });
    assert!(matches!(found[1], Some(NcclError::OldLibrary { .. })));
    match &found[0] {
        Some(NcclError::Peer { rank: 1, reason }) => assert!(reason.contains("found 2.10.3")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_gpu_for_two_ranks_is_refused_by_name_on_all() {
    let _turn = turn();
    let found = errors(&[0, 0], |_| options());
    assert_eq!(found[0], found[1]);
    match &found[0] {
        Some(NcclError::SharedDevice { first: 0, second: 1, device: 0, name }) => {
            assert!(!name.is_empty())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_with_different_scratch_are_refused_on_all() {
    let _turn = turn();
    if sizes().len() < 2 {
        return;
    }
    let found = errors(&[0, 1], |rank| NcclOptions { scratch_bytes: 1000 + rank, ..options() });
    let expected = NcclError::ScratchDiffers { rank: 1, expected: 1000, found: 1001 };
    assert_eq!(found, [Some(expected.clone()), Some(expected)]);
}

#[test]
fn too_little_memory_for_calls_says_how_much_was_asked() {
    let _turn = turn();
    // More than the emulated machine has, four times over.
    let error = alone(&NcclOptions { scratch_bytes: 1 << 60, ..options() });
    let text = error.to_string();
    assert!(
        text.starts_with("nccl: cuMemAlloc: CUDA error 2, out of memory, for twice")
            && text.contains("smaller `NcclOptions::scratch_bytes`"),
        "{text}"
    );
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    let _turn = turn();
    let count = sizes().len();
    let made = NcclCommunicator::new(Box::new(Solo::new()), 99, &options());
    let expected = NcclError::NoSuchDevice { rank: 0, device: 99, count };
    assert_eq!(made.unwrap_err(), expected);
}

#[test]
fn a_group_says_what_it_runs_on() {
    let _turn = turn();
    let comm = NcclCommunicator::new(Box::new(Solo::new()), 0, &options()).unwrap();
    assert!(comm.library_version().starts_with("2."));
    assert!(!comm.gpu().0.is_empty() && comm.gpu().1 == 0);
}

#[test]
fn ranks_that_meet_in_a_folder_reduce_split_and_leave_nothing() {
    let _turn = turn();
    let options = options();
    for ranks in sizes() {
        let folder = std::env::temp_dir().join(format!("fusestep-nccl-{}", std::process::id()));
        std::thread::scope(|scope| {
            for rank in 0..ranks {
                let meeting = Meeting { rank, world_size: ranks, ..Meeting::at(&folder) };
                let options = &options;
                scope.spawn(move || {
                    let control = Box::new(meeting.join().unwrap());
                    let mut comm = NcclCommunicator::new(control, rank, options).unwrap();
                    let mut buffer = vec![rank as f32 + 0.5; 1001];
                    comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                    let sum = (0..ranks).map(|rank| rank as f32 + 0.5).sum::<f32>();
                    assert_eq!(buffer, vec![sum; 1001]);
                    let membership = Membership { colour: rank as u32 % 2, key: 0 };
                    let mut half = comm.split(Some(membership)).unwrap().unwrap();
                    let mut value = [1i64];
                    half.all_reduce(&mut value, ReduceOp::Sum).unwrap();
                    assert_eq!(value, [(ranks as i64 + 1 - rank as i64 % 2) / 2]);
                });
            }
        });
        assert!(!folder.exists(), "{} is left", folder.display());
    }
}
