//! The emulated driver, called by a C++ program as a real one would be: each check in a process of
//! its own, for its faults stay.

#[path = "driver/ptx.rs"]
mod ptx;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use fusestep_cuda_emulator::{EmulatorError, Options, Sanitize, build};

/// The programs and the folder of their library.
struct Probe {
    _folder: tempfile::TempDir,
    program: PathBuf,
    /// Runs PTX of a file.
    ptx_program: PathBuf,
    libraries: PathBuf,
}

impl Probe {
    fn new(sanitize: Sanitize) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let options = Options { sanitize, ..Options::default() };
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let library = build(&here.join("tests/kernels"), folder.path(), &options)
            .unwrap_or_else(|error| panic!("{error}"));
        let libraries = library.parent().expect("a file's folder").to_owned();
        let compiled = |name: &str| {
            let program = folder.path().join(name);
            let mut command = Command::new(options.compiler());
            command.args(["-std=c++17", "-O1", "-pthread"]);
            if sanitize == Sanitize::AddressAndUndefined {
                command.arg("-fsanitize=address,undefined");
            }
            command.arg("-I").arg(here.join("src"));
            command.arg(here.join("tests").join(name).with_extension("cpp"));
            command.arg("-o").arg(&program);
            command.arg("-L").arg(&libraries).arg("-lcuda");
            let output = command.output().expect("a C++ compiler");
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{errors}");
            program
        };
        let (program, ptx_program) = (compiled("probe"), compiled("ptx_program"));
        Self { _folder: folder, program, ptx_program, libraries }
    }

    fn run(&self, check: &str, environment: &[(&str, &str)]) -> Output {
        let mut command = Command::new(&self.program);
        command.arg(check).env("LD_LIBRARY_PATH", &self.libraries);
        // The system's memory checker may not run under a debugger or a container's tracer, and
        // faults leave handles behind.
        command.env("ASAN_OPTIONS", "detect_leaks=0");
        command.envs(environment.iter().copied());
        command.output().expect("the program starts")
    }
}

fn plain() -> &'static Probe {
    static PROBE: OnceLock<Probe> = OnceLock::new();
    PROBE.get_or_init(|| Probe::new(Sanitize::Off))
}

/// Runs a check that must pass and returns what the emulator wrote to standard error.
fn passes(check: &str, environment: &[(&str, &str)]) -> String {
    let output = plain().run(check, environment);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "{check}: {:?}\n{}{errors}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
    );
    errors
}

#[test]
fn kernels_give_their_results_whether_their_threads_wait_or_not() {
    assert_eq!(passes("threads_that_never_wait", &[]), "");
    assert_eq!(passes("threads_that_wait", &[]), "");
}

#[test]
fn accesses_out_of_bounds_fail_and_say_where() {
    let text = passes("load_past_the_end", &[]);
    assert!(
        text.contains("twice_small block (1, 0, 0) thread (36, 0, 0): load of 4 bytes at 0x"),
        "{text}"
    );
    assert!(text.contains("has 4096 bytes and this is byte 4096"), "{text}");
    assert!(passes("store_past_the_end", &[]).contains("store of 4 bytes"));
    assert!(passes("before_the_start", &[]).contains("out of bounds"));
    assert!(passes("freed_memory", &[]).contains("in a freed allocation"));
}

#[test]
fn misaligned_accesses_fail() {
    assert!(passes("misaligned", &[]).contains("load of 4 bytes"));
    assert!(passes("misaligned_pack", &[]).contains("load of 16 bytes"));
}

#[test]
fn threads_that_do_not_meet_fail_the_launch() {
    let text = passes("half_leave", &[]);
    assert!(
        text.contains(
            "thread (32, 0, 0) waits at block_sync; of its block 32 threads are at block_sync, 32 \
             threads are exited"
        ),
        "{text}"
    );
    assert!(
        passes("two_barriers", &[])
            .contains("2 threads are at block_sync, 62 threads are at shuffle")
    );
    assert!(passes("two_masks", &[]).contains("with the same lane mask"));
    assert!(passes("missing_lane", &[]).contains("lane 29 asks lane 31, which does not exist"));
}

#[test]
fn a_fault_is_reported_while_other_threads_wait() {
    let text = passes("last_faults", &[]);
    assert!(text.contains("last_faults block (0, 0, 0) thread (63, 0, 0): store"), "{text}");
}

#[test]
fn shared_memory_is_bounded() {
    assert!(passes("hungry", &[]).contains("49152 bytes of shared memory and asks for 65536"));
}

#[test]
fn bad_calls_are_refused() {
    passes("memory_table", &[]);
    passes("launch_arguments", &[]);
    passes("no_context", &[]);
}

#[test]
fn ptx_must_fit_driver_device_and_sources() {
    let text = passes("ptx_headers", &[]);
    assert!(text.contains("PTX 8.5: this driver reads no newer than 8.4"), "{text}");
    assert!(
        text.contains("entry packs takes 72 argument bytes in the PTX and 64 in the source"),
        "{text}"
    );
    assert!(text.contains("entry unknown of the PTX"), "{text}");
}

#[test]
fn the_environment_sets_driver_and_devices() {
    let text = passes("old_driver", &[("FUSESTEP_EMULATOR_DRIVER", "12000")]);
    assert!(text.contains("takes 32760 argument bytes, this driver passes 4096"), "{text}");
    passes("no_device", &[("FUSESTEP_EMULATOR_DEVICES", "0")]);
}

#[test]
fn an_occupied_stream_keeps_calls_that_wait_for_its_device_and_no_others() {
    passes("occupied_streams", &[("FUSESTEP_EMULATOR_DEVICES", "2")]);
}

#[test]
fn sanitizers_run_with_fibers_and_see_accesses_beside_the_dialect() {
    let probe = Probe::new(Sanitize::AddressAndUndefined);
    for check in ["threads_that_never_wait", "threads_that_wait", "last_faults"] {
        let output = probe.run(check, &[]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{check}: {errors}");
        assert!(!errors.contains("Sanitizer"), "{check}: {errors}");
    }
    let output = probe.run("beside_the_dialect", &[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("heap-buffer-overflow"), "{errors}");
    // The plain library cannot see it.
    passes("beside_the_dialect", &[]);
}

#[test]
fn what_cannot_be_built_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("out");
    let error = build(folder.path(), &out, &Options::default()).unwrap_err();
    assert!(error.to_string().ends_with("expected .cu files, found none"));
    let kernel = folder.path().join("broken.cu");
    std::fs::write(&kernel, "int f() { return undeclared; }\n").expect("writable");
    let error = build(folder.path(), &out, &Options::default()).unwrap_err();
    let EmulatorError::Compile { output, .. } = error else {
        panic!("{error}");
    };
    assert!(output.contains("broken.cu:1:") && output.contains("undeclared"));
    let nowhere = Options { compiler: Some("no-such-compiler".into()), ..Options::default() };
    let error = build(folder.path(), &out, &nowhere).unwrap_err();
    assert!(error.to_string().contains("`no-such-compiler`"), "{error}");
}
