//! Runs that go on under other settings: each is refused by the flag that differs, with advice that
//! works.

use crate::{Folder, fusestep, ok, refused, text};

/// A saved run, and what goes on from it in vain.
struct Case {
    saved: &'static [&'static str],
    resumed: &'static [&'static str],
    said: &'static str,
}

const TRANSFORMER: [&str; 8] =
    ["--model", "transformer", "--layers", "1", "--width", "16", "--context", "8"];

const CASES: &[Case] = &[
    Case {
        saved: &[],
        resumed: &["--model", "transformer"],
        said: "--model: expected transformer, found digits in the checkpoint; give --model d",
    },
    Case {
        saved: &["--dtype", "f16", "--master-weights", "f32"],
        resumed: &[],
        said: "--dtype: expected f32, found f16 in the checkpoint; give --dtype f16 to go on",
    },
    Case {
        saved: &["--lr-scale", "layer2=0", "--lr-scale", "layer1=0.5"],
        resumed: &[],
        said: "--lr-scale: expected none, found layer2=0, layer1=0.5 in the checkpoint; give \
               --lr-scale layer2=0 --lr-scale layer1=0.5 to go on, or allow other settings by \
               --any-settings",
    },
    Case {
        saved: &[],
        resumed: &["--lr-scale", "layer2=0"],
        said: "found none in the checkpoint; leave --lr-scale out to go on, or allow other",
    },
    Case {
        saved: &["--loss-scale", "dynamic"],
        resumed: &[],
        said: "--loss-scale: expected none, found times 2 after 2000 good steps",
    },
    Case {
        saved: &["--loss-scale", "dynamic:growth_interval=5"],
        resumed: &[],
        said: "go on with --loss-scale dynamic:growth=2,growth_interval=5,backoff=0.5,",
    },
    Case {
        saved: &["--optimizer", "momentum", "--nesterov"],
        resumed: &["--optimizer", "momentum"],
        said: "--nesterov: expected none, found 1; go on with --nesterov, or allow other",
    },
    Case {
        saved: &["--optimizer", "rmsprop"],
        resumed: &["--optimizer", "rmsprop", "--centered"],
        said: "go on without --centered, or begin in another folder",
    },
    Case {
        saved: &["--optimizer", "momentum", "--decay", "decoupled", "--weight-decay", "0.1"],
        resumed: &["--optimizer", "momentum", "--weight-decay", "0.1"],
        said: "--decay: expected l2, found decoupled; go on with --decay decoupled, or begin",
    },
    Case {
        saved: &["--optimizer", "momentum"],
        resumed: &["--optimizer", "momentum", "--momentum", "0"],
        said: "--optimizer: expected sgd (momentum at --momentum 0), found momentum, which it",
    },
    Case {
        saved: &["--amsgrad"],
        resumed: &[],
        said: "precision that it was saved with: it was saved with --amsgrad",
    },
    Case {
        saved: &[],
        resumed: &["--amsgrad"],
        said: "precision that it was saved with: it was saved without --amsgrad",
    },
    Case {
        saved: &["--dtype", "bf16", "--master-weights", "f32"],
        resumed: &["--dtype", "bf16"],
        said: "go on with that, or begin in another folder",
    },
    Case {
        saved: &["--exclude", "bias"],
        resumed: &[],
        said: "found 0; go on with --exclude layer0.bias, or allow other settings by \
               --any-settings; the same for `layer1.bias`, `layer2.bias`",
    },
];

#[test]
fn settings_that_differ_are_refused_by_their_flag() {
    for Case { saved, resumed, said } in CASES {
        let folder = Folder::new();
        let run = folder.path("run");
        let train = ["train", "--batch", "400", "--checkpoint", text(&run), "--epochs"];
        ok(&[&train[..], &["1"], saved].concat());
        let resume = [&train[..], &["2", "--resume"]].concat();
        for ranks in [&[][..], &["--ranks", "2"]] {
            let error = refused(&[&resume[..], resumed, ranks].concat());
            assert!(error.contains(said), "{saved:?} {resumed:?}: {error}");
        }
        ok(&[&resume[..], saved].concat());
    }
}

#[test]
fn another_number_of_heads_is_refused() {
    let folder = Folder::new();
    let run = folder.path("run");
    let train =
        [&["train", "--batch", "64", "--checkpoint", text(&run)][..], &TRANSFORMER].concat();
    ok(&[&train[..], &["--epochs", "1", "--heads", "2"]].concat());
    let resume = [&train[..], &["--epochs", "2", "--resume", "--heads"]].concat();
    let error = refused(&[&resume[..], &["8"]].concat());
    let said = "--heads: expected 8, found 2 in the checkpoint; give --heads 2 to go on";
    assert!(error.contains(said), "{error}");
    ok(&[&resume[..], &["2"]].concat());
}

#[test]
fn advice_to_convert_state_works_when_it_is_followed() {
    let folder = Folder::new();
    let [run, coded, kept] = ["run", "coded", "kept"].map(|name| folder.path(name));
    let train = ["train", "--batch", "400", "--epochs"];
    ok(&[&train[..], &["1", "--checkpoint", text(&run)]].concat());
    let convert = ["checkpoint", "convert"];
    ok(&[&convert[..], &[text(&run), "--state-dtype", "int8", "--out", text(&coded)]].concat());
    let own = ["2", "--resume", "--state-dtype", "int8", "--keep-f32", "layer0.weight"];
    let error = refused(&[&train[..], &own, &["--checkpoint", text(&coded)]].concat());
    let advice = error.split("`fusestep checkpoint convert ").nth(1).unwrap();
    let flags: Vec<&str> = advice.split('`').next().unwrap().split(' ').collect();
    assert_eq!(flags, ["--state-dtype", "int8", "--keep-f32", "layer0.weight"], "{error}");
    ok(&[&convert[..], &[text(&run)], &flags, &["--out", text(&kept)]].concat());
    ok(&[&train[..], &own, &["--checkpoint", text(&kept)]].concat());
}

#[test]
fn a_state_file_of_codes_is_refused_by_the_type_that_works() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let [out, state] = ["out", "state"].map(|name| folder.path(name));
    let step = ["step", "--params", text(&params), "--grads", text(&grads), "--out", text(&out)];
    let bf16 = ["--state-dtype", "bf16"];
    ok(&[&step[..], &bf16, &["--state-out", text(&state)]].concat());
    let again = [&step[..], &["--state", text(&state), "--any-parameters"]].concat();
    let error = refused(&again);
    let said = "expected state in f32, found state in bf16; give --state-dtype bf16, or conv";
    assert!(error.contains(said), "{error}");
    ok(&[&again[..], &bf16].concat());
}

#[test]
fn what_a_resumed_run_begins_with_is_told_as_it_is() {
    let folder = Folder::new();
    let [run, file] = ["run", "flags.toml"].map(|name| folder.path(name));
    let train = ["train", "--batch", "400", "--checkpoint", text(&run), "--loss-scale"];
    ok(&[&train[..], &["dynamic", "--epochs", "1"]].concat());
    let resume = ["dynamic:start=8", "--epochs", "2", "--resume", "--write-config", text(&file)];
    let resumed = fusestep(&[&train[..], &resume].concat());
    let error = String::from_utf8(resumed.stderr).unwrap();
    let note = "note: --loss-scale: the run goes on at 65536, as it was saved; 8 is where a run";
    assert!(resumed.status.success() && error.contains(note), "{error}");
    let flags = std::fs::read_to_string(&file).unwrap();
    let said = ", but from its beginning: it went on from the checkpoint below, as that was then";
    assert!(flags.contains(said) && flags.contains("and what it went on from:"), "{flags}");
}

#[test]
fn a_step_that_writes_over_its_inputs_says_so_in_its_file_of_flags() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let file = folder.path("flags.toml");
    let step = ["step", "--params", text(&params), "--grads", text(&grads), "--out", text(&params)];
    ok(&[&step[..], &["--write-config", text(&file)]].concat());
    let flags = std::fs::read_to_string(&file).unwrap();
    assert!(flags.contains(", if its inputs are as they were: it wrote over them"), "{flags}");
}

#[test]
fn state_types_of_f64_parameters_are_told_as_flags_have_them() {
    for dtype in ["bf16", "int8"] {
        let error = refused(&["train", "--epochs", "1", "--dtype", "f64", "--state-dtype", dtype]);
        let said = format!("expected none, found {dtype}; leave --state-dtype out");
        assert!(error.contains(&said), "{error}");
    }
}

#[test]
fn files_of_a_checkpoint_are_no_outputs() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let run = folder.path("run");
    ok(&["train", "--batch", "400", "--epochs", "1", "--checkpoint", text(&run)]);
    let saved = std::fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().path());
    let saved = saved.into_iter().find(|path| path.is_dir()).unwrap();
    for file in [run.join("manifest.json"), saved.join("model.safetensors")] {
        let step = ["step", "--params", text(&params), "--grads", text(&grads), "--out"];
        let error = refused(&[&step[..], &[text(&file)]].concat());
        assert!(error.contains("--out") && error.contains("checkpoint would be lost"), "{error}");
        let train = ["train", "--batch", "400", "--epochs", "1", "--write-config", text(&file)];
        let error = refused(&train);
        assert!(error.contains("--write-config") && error.contains("be lost, so"), "{error}");
    }
    ok(&["checkpoint", "verify", text(&run)]);
    // Other files may lie beside it, and be replaced.
    let report = run.join("report.html");
    for _ in 0..2 {
        ok(&["train", "--batch", "400", "--epochs", "1", "--report", text(&report)]);
    }
}
