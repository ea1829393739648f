//! The launcher: what ranks are told, how failures end, and that nothing is left.

#[allow(dead_code)]
#[path = "processes/start.rs"]
mod start;

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fusestep_collective::{Collectives, Communicator};
use fusestep_collective_processes::{
    LaunchOptions, Launched, ProcessCommunicator, ProcessOptions, launch,
};

/// The body of the ranks that these tests launch.
#[test]
fn a_rank() {
    if !start::is_rank() {
        return;
    }
    let mut comm = ProcessCommunicator::world(&ProcessOptions::default()).unwrap();
    comm.barrier().unwrap();
    let how = std::env::var("TEST_HOW").unwrap_or_default();
    if let Ok(folder) = std::env::var("TEST_FOLDER") {
        let path = std::path::Path::new(&folder).join(comm.rank().to_string());
        std::fs::write(path, "").unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while Instant::now() < until {
            comm.barrier().unwrap();
        }
    }
    if how == "kill" && comm.rank() == 1 {
        let own = std::process::id().to_string();
        Command::new("kill").args(["-KILL", &own]).status().unwrap();
    }
    if let Err(error) = comm.barrier() {
        eprintln!("rank {}: {error}", comm.rank());
        std::process::exit(3);
    }
}

fn shell(ranks: usize, script: &str) -> LaunchOptions {
    LaunchOptions {
        arguments: vec!["-c".into(), script.into()],
        grace: Duration::from_millis(300),
        ..LaunchOptions::new(ranks, "sh")
    }
}

#[test]
fn ranks_are_told_their_places_and_success_is_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    let script = format!(
        "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $FUSESTEP_SESSION > {path}/$RANK"
    );
    let ended = launch(&shell(3, &script)).unwrap();
    assert_eq!((ended.code, ended.failed), (0, None));
    let told = |rank: usize| std::fs::read_to_string(folder.path().join(rank.to_string())).unwrap();
    for rank in 0..3 {
        let session = told(0).split(' ').nth(4).unwrap().to_owned();
        assert_eq!(session.trim().len(), 32);
        assert_eq!(told(rank), format!("{rank} {rank} 3 3 {session}"));
    }
}

#[test]
fn the_first_failure_is_the_code_and_ends_the_others() {
    let begun = Instant::now();
    let failed = launch(&shell(3, "[ $RANK = 1 ] && exit 7; exec sleep 60")).unwrap();
    assert_eq!((failed.code, failed.failed), (7, Some(1)));
    let killed = launch(&shell(2, "[ $RANK = 1 ] && kill -9 $$; exit 0")).unwrap();
    assert_eq!((killed.code, killed.failed), (137, Some(1)));
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert!(launch(&LaunchOptions::new(2, "/no/such/program")).is_err());
}

#[test]
fn ranks_that_do_not_answer_end_soon_after_the_first_failure() {
    for deaf in ["kill -STOP $$; sleep 60", "exec sleep 60"] {
        let begun = Instant::now();
        let script = format!("[ $RANK = 1 ] && exit 7; {deaf}");
        let grace = LaunchOptions::new(2, "sh").grace;
        let failed = launch(&LaunchOptions { grace, ..shell(2, &script) }).unwrap();
        assert_eq!((failed.code, failed.failed), (7, Some(1)));
        assert!(begun.elapsed() < Duration::from_secs(5), "{deaf}: {:?}", begun.elapsed());
    }
}

#[test]
fn survivors_have_time_to_name_the_dead() {
    let own = std::env::current_exe().unwrap();
    let script = format!("TEST_HOW=kill exec {} a_rank --exact --nocapture", own.display());
    let options = LaunchOptions { grace: Duration::from_secs(10), ..shell(3, &script) };
    let begun = Instant::now();
    let Launched { code, failed, .. } = launch(&options).unwrap();
    assert_eq!((code, failed), (137, Some(1)));
    assert!(begun.elapsed() < Duration::from_secs(5), "they end by themselves");
    assert_eq!(start::left_behind(), Vec::<String>::new());
}

/// A launcher that the test below kills.
#[test]
fn a_starter() {
    if start::is_rank() || std::env::var_os("TEST_FOLDER").is_none() {
        return;
    }
    let arguments = ["--exact", "a_rank", "--nocapture"].map(Into::into).into();
    launch(&LaunchOptions { arguments, ..LaunchOptions::new(2, std::env::current_exe().unwrap()) })
        .unwrap();
}

/// Waits until the ranks of that launcher have said so in the folder.
fn wait_for_ranks(folder: &std::path::Path) {
    let came = || (0..2).all(|rank: usize| folder.join(rank.to_string()).exists());
    let begun = Instant::now();
    while !came() {
        assert!(begun.elapsed() < Duration::from_secs(30), "ranks did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_signal_that_the_launcher_was_started_to_ignore_ends_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let own = std::env::current_exe().unwrap();
    let script = format!("trap '' HUP; exec {} --exact a_starter --nocapture", own.display());
    let mut starter = Command::new("sh")
        .args(["-c", &script])
        .env("TEST_FOLDER", folder.path())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_ranks(folder.path());
    let process = starter.id().to_string();
    let send = |signal: &str| {
        Command::new("kill").args([signal, &process]).status().unwrap();
    };
    send("-HUP");
    std::thread::sleep(Duration::from_millis(500));
    let ended_before = starter.try_wait().unwrap();
    send("-TERM");
    let begun = Instant::now();
    starter.wait().unwrap();
    assert_eq!(ended_before, None, "SIGHUP was not ignored");
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn ranks_end_when_their_launcher_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut starter = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_starter", "--nocapture"])
        .env("TEST_FOLDER", folder.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for_ranks(folder.path());
    let process = starter.id();
    starter.kill().unwrap();
    starter.wait().unwrap();
    let killed = Instant::now();
    // Ends when the last rank has.
    let mut told = String::new();
    starter.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}: {told}", killed.elapsed());
    let named = format!("expected the launcher, process {process}, to look after this rank");
    assert!(told.contains(&named), "{told}");
    let of_launcher = format!(".{process}.note-");
    let left = start::left_behind();
    assert!(!left.iter().any(|name| name.contains(&of_launcher)), "{left:?}");
}

/// A launcher of a shell script that the tests below send signals to.
#[test]
fn a_launcher_of_scripts() {
    let (Ok(folder), Ok(script)) = (std::env::var("TEST_FOLDER"), std::env::var("TEST_SCRIPT"))
    else {
        return;
    };
    let script = script.replace("FOLDER", &folder);
    let patience = std::env::var("TEST_PATIENCE_MS").map_or(500, |text| text.parse().unwrap());
    let patience = Duration::from_millis(patience);
    let ended = launch(&LaunchOptions { patience, ..shell(2, &script) }).unwrap();
    std::process::exit(i32::from(ended.code));
}

/// The processes whose numbers ranks have written into the folder and that still run.
fn running(folder: &std::path::Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).unwrap();
    let numbers = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    let is_running = |number: &String| {
        let state = std::fs::read_to_string(format!("/proc/{}/stat", number.trim()));
        state.is_ok_and(|state| !state.contains(") Z "))
    };
    numbers.filter(is_running).collect()
}

/// Whether this process ignores a signal, and what it starts likewise: `nohup` has it ignore HUP,
/// a shell that starts it in the background INT and QUIT.
fn ignores(signal: &str) -> bool {
    let number = match signal {
        "-HUP" => 1,
        "-INT" => 2,
        "-QUIT" => 3,
        _ => 15,
    };
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() >> (number - 1) & 1 == 1
}

#[test]
fn what_ranks_have_started_ends_with_the_launcher() {
    let child = "sleep 300 & echo $! > FOLDER/$RANK; wait; true";
    // Out of the wrapper's group and session, and deaf.
    let away = "setsid sh -c 'trap \"\" TERM; echo $$ > FOLDER/$RANK; while true; do sleep 1; done'\
                & wait; true";
    let deaf =
        "trap '' TERM HUP INT; sleep 300 & echo $$ > FOLDER/$RANK; while true; do wait; done";
    for (script, signal) in [
        (child, "-TERM"),
        (child, "-HUP"),
        (child, "-QUIT"),
        (away, "-TERM"),
        (deaf, "-TERM"),
        (deaf, "-INT"),
    ] {
        if ignores(signal) {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut starter = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_launcher_of_scripts", "--nocapture"])
            .envs([("TEST_FOLDER", folder.path().as_os_str()), ("TEST_SCRIPT", script.as_ref())])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_for_ranks(folder.path());
        // The file is made before its line is written.
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(running(folder.path()).len(), 2);
        Command::new("kill").args([signal, &starter.id().to_string()]).status().unwrap();
        let begun = Instant::now();
        let ended = starter.wait().unwrap();
        assert!(!ended.success(), "{script}");
        assert!(begun.elapsed() < Duration::from_secs(15), "{script}: {:?}", begun.elapsed());
        assert_eq!(running(folder.path()), Vec::<String>::new(), "{script} {signal}");
    }
}

#[test]
fn what_ranks_have_started_has_their_patience_after_a_signal() {
    // A program whose wrapper ends of a signal without a word to it. It saves for longer than it
    // would have where nobody has asked for the end.
    let save =
        "save() { trap \"\" TERM; sleep 6; echo $$ > FOLDER/saved.$RANK; exit; }; trap save TERM";
    let work = "echo $$ > FOLDER/$RANK; while true; do sleep 0.1; done";
    let script = format!("sh -c '{save}; {work}' & wait; true");
    let folder = tempfile::tempdir().unwrap();
    let mut starter = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_launcher_of_scripts", "--nocapture"])
        .envs([("TEST_FOLDER", folder.path().as_os_str()), ("TEST_SCRIPT", script.as_ref())])
        .env("TEST_PATIENCE_MS", "30000")
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_ranks(folder.path());
    std::thread::sleep(Duration::from_millis(100));
    Command::new("kill").args(["-TERM", &starter.id().to_string()]).status().unwrap();
    assert!(!starter.wait().unwrap().success());
    for rank in 0..2 {
        assert!(folder.path().join(format!("saved.{rank}")).exists(), "rank {rank} was cut short");
    }
    assert_eq!(running(folder.path()), Vec::<String>::new());
}

#[test]
fn what_cannot_be_started_is_named() {
    let guard = Some("/proc/none/exe".into());
    let error = launch(&LaunchOptions { guard, ..shell(1, "exit 0") }).unwrap_err().to_string();
    assert!(error.contains("cannot start /proc/none/exe as the guard of the ranks"), "{error}");
    assert!(error.contains("mount /proc"), "{error}");
    let error = launch(&LaunchOptions::new(2, "/no/such/program")).unwrap_err().to_string();
    assert!(error.contains("cannot start /no/such/program"), "{error}");
}

#[test]
fn what_ranks_have_left_ends_when_they_end_well() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("sleep 300 & echo $! > {}/$RANK", folder.path().display());
    let ended = launch(&shell(2, &script)).unwrap();
    assert_eq!((ended.code, ended.failed), (0, None));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    assert_eq!(running(folder.path()), Vec::<String>::new());
}
