//! Refusals and notes in the words of the command line: flags, both values, and what works.

use serde_json::Value;

use crate::messages::shapes;
use crate::{Folder, fusestep, ok, refused, text};

/// Shapes of a model of many tensors.
const SHAPES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/shapes/resnet50.json");

/// What a command that succeeds prints on standard error.
fn told(args: &[&str]) -> String {
    let output = fusestep(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {error}");
    error
}

#[test]
fn a_run_under_another_setting_is_told_its_flag_and_the_saved_value() {
    let folder = Folder::new();
    let saved = folder.path("run");
    let train = ["train", "--checkpoint", text(&saved), "--batch", "200", "--epochs"];
    ok(&[&train[..], &["1", "--clip-norm", "1"]].concat());
    let resume = [&train[..], &["2", "--resume"]].concat();
    for (flags, said) in [
        (
            &["--clip-norm", "2"][..],
            "run: --clip-norm: expected 2, found 1; go on with --clip-norm 1",
        ),
        (&[], "run: --clip-norm: expected none, found 1; go on with --clip-norm 1, or allow"),
        (&["--clip-norm", "1", "--beta1", "0.8"], "run: --beta1: expected 0.8, found 0.9; go on w"),
        (&["--optimizer", "lion"], "run: --optimizer: expected lion, found adamw, which it was s"),
        (&["--clip-norm", "1", "--maximize"], "run: --maximize: expected maximize, found minimize"),
        (
            &["--clip-norm", "1", "--state-dtype", "bf16"],
            "run: `layer0.bias@moment1`: expected state in bf16, found state in f32; go on with",
        ),
        (
            &["--clip-norm", "1", "--exclude", "bias"],
            "run: --exclude and --weight-decay-of of `layer0.bias`: expected 0, found none",
        ),
        (
            &["--clip-norm", "1", "--schedule", "warmup:9"],
            "run: --schedule: expected `warmup:9`, or one that is the same in the steps taken",
        ),
    ] {
        for ranks in [&[][..], &["--ranks", "2"]] {
            let error = refused(&[&resume, flags, ranks].concat());
            assert!(error.contains(said), "{flags:?}: {error}");
            assert!(error.contains("; go on with ") && !error.contains("any_settings"), "{error}");
        }
    }
    let averaged = ["--clip-norm", "1", "--ranks", "2", "--local-sgd", "4"];
    let error = refused(&[&resume[..], &averaged].concat());
    let said =
        "run: --local-sgd: expected averages every 4 steps, found no averages of parameters; go";
    assert!(error.contains(said), "{error}");
    let error = refused(&[&resume[..], &["--clip-norm", "2"]].concat());
    assert!(error.contains("or allow other settings by --any-settings"), "{error}");
    ok(&[&resume[..], &["--clip-norm", "2", "--any-settings"]].concat());
}

#[test]
fn a_state_of_another_setting_is_told_its_flag() {
    let folder = Folder::new();
    let (params, grads) = folder.model();
    let [out, state] = ["out", "state"].map(|name| folder.path(name));
    let step = ["step", "--params", text(&params), "--grads", text(&grads), "--out", text(&out)];
    ok(&[&step[..], &["--state-out", text(&state)]].concat());
    let again = ["--state", text(&state), "--any-parameters", "--beta2", "0.9"];
    let error = refused(&[&step[..], &again].concat());
    let said = "--beta2: expected 0.9, found 0.999; go on with --beta2 0.999, or allow other";
    assert!(error.contains(said) && error.contains("by --any-settings"), "{error}");
    ok(&[&step[..], &again, &["--any-settings"]].concat());
}

#[test]
fn a_refusal_ends_in_one_advice() {
    for (flags, end) in [
        (&["--reduce-dtype", "f32"][..], "in f32 in any case; leave --reduce-dtype out"),
        (
            &["--ranks", "2", "--dtype", "bf16", "--reduce-dtype", "bf16"],
            "travel in fewer bits; leave --reduce-dtype out",
        ),
        (
            &["--ranks", "2", "--zero", "3", "--update-in-backward"],
            "would come between the updates' calls; use stage 2",
        ),
        (&["--ranks", "2", "--zero", "1", "--local-sgd", "2"], "are reduced; remove one"),
        (&["--optimizer", "schedule-free", "--schedule", "warmup:2"], "a schedule; remove one"),
    ] {
        let error = refused(&[&["train", "--epochs", "1"], flags].concat());
        assert!(error.trim_end().ends_with(end), "{flags:?}: {error}");
    }
}

#[test]
fn numbers_of_a_rule_out_of_range_go_by_their_flags() {
    for (flag, value) in [("--lr", "-1"), ("--beta1", "1"), ("--weight-decay", "-1")] {
        let error = refused(&["train", flag, value]);
        assert!(error.contains(&format!("error: {flag}: expected ")), "{error}");
    }
}

#[test]
fn a_setting_that_others_leave_idle_is_told_which_value_works() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let ranks = ["plan", text(&shapes), "--world", "2"];
    for (flags, said) in [
        (
            &["--accumulate", "1", "--accumulated", "sum"][..],
            "--accumulate of 2 or more too, found 1",
        ),
        (
            &["--rounding", "nearest", "--rounding-seed", "3"],
            "--rounding stochastic too, found near",
        ),
        (&["--zero", "1", "--broadcast-cap-mib", "2"], "--owners tensors too, found elements"),
        (&["--zero", "0", "--owners", "tensors"], "--zero of 1 or more too, found 0"),
        (&["--local-sgd-begin", "2"], "--local-sgd too, found none"),
    ] {
        let error = refused(&[&ranks[..], flags].concat());
        assert!(error.contains(said) && error.contains("it has no effect otherwise"), "{error}");
    }
}

#[test]
fn a_loss_scale_is_refused_by_the_key_and_value_that_are_wrong() {
    let range = |key: &str, values: &str| format!("expected {key}= to be {values}");
    for (scale, said) in [
        ("dynamic:strat=4", "`strat` is none of them".to_owned()),
        ("dynamic:strat=4", "keys of start, growth, growth_interval, backoff, ".to_owned()),
        ("dynamic:start=3", range("start", "a power of two from 1 to 2^126")),
        ("dynamic:growth=0.5", range("growth", "a power of two from 1 to 2^126")),
        ("dynamic:backoff=2", range("backoff", "a power of two from 2^-126 to 1")),
        ("dynamic:growth_interval=0", range("growth_interval", "a whole number from 1 on")),
        ("dynamic:floor=131072", range("floor", "a power of two from 1 to start")),
        ("1000", "expected a power of two from 1 to 2^126".to_owned()),
    ] {
        let error = refused(&["train", "--loss-scale", scale]);
        assert!(error.contains("--loss-scale") && error.contains(&said), "{scale}: {error}");
    }
}

#[test]
fn a_run_that_skips_every_step_is_told_what_helps() {
    let run = ["train", "--epochs", "1", "--dtype", "f16", "--loss-scale"];
    let constant = told(&[&run[..], &["8.507059173023462e37"]].concat());
    let said = "every step was skipped: with --loss-scale 2^126 ";
    let advice = "give --loss-scale dynamic, or a smaller constant";
    assert!(constant.contains(said) && constant.contains(advice), "{constant}");
    assert!(!constant.contains("another --lr") && !constant.contains("start="), "{constant}");
    assert!(!told(&[&run[..], &["dynamic"]].concat()).contains("every step was skipped"));
}

#[test]
fn lanes_without_a_rank_or_a_sample_are_told() {
    for command in [&["train", "--ranks", "5"][..], &["plan", SHAPES, "--world", "5"]] {
        let error = refused(&[command, &["--lanes", "4"]].concat());
        assert!(error.contains("error: --lanes: expected at most 4 ranks for 4 lanes"), "{error}");
    }
    let train = ["train", "--epochs", "1", "--lanes", "8", "--batch"];
    let found = told(&[&train[..], &["6"]].concat());
    let note = "note: 2 of 8 lanes are without a sample in every update: --batch 6 is smaller";
    assert_eq!(found.matches(note).count(), 1, "{found}");
    assert!(!told(&[&train[..], &["8"]].concat()).contains("in every update"));
    // The digits end in a batch of 29 samples, of 1,437.
    let found = told(&["train", "--epochs", "1", "--lanes", "32"]);
    let note = "note: 3 of 32 lanes are without a sample in the last update of each epoch, which \
                has 29 samples";
    assert_eq!(found.matches(note).count(), 1, "{found}");
}

#[test]
fn flags_of_other_commands_are_met_with_these() {
    for (command, flag, said) in [
        (&["step", "--params", "p", "--grads", "g", "--out", "o"][..], "--zero", "of plan, train"),
        (&["step", "--params", "p", "--grads", "g", "--out", "o"], "--lanes", "of plan, train"),
        (&["launch", "-n", "2"], "--prefixes", "--prefix"),
        (&["checkpoint", "verify", "run"], "--ranks", "has no effect in checkpoint"),
    ] {
        let error = refused(&[command, &[flag, "2"]].concat());
        assert!(error.contains(said) && error.matches("tip:").count() == 1, "{error}");
        assert!(!error.contains("--verbose") && !error.contains("--tables"), "{error}");
    }
}

#[test]
fn what_is_no_number_is_told_a_number() {
    for (command, flag) in [
        (&["train"][..], "--lr"),
        (&["plan", SHAPES, "--world", "2"], "--latency-us"),
        (&["plan", SHAPES, "--world", "2"], "--backward-ms"),
    ] {
        let error = refused(&[command, &[flag, "abc"]].concat());
        let said = "expected a number such as 0.001";
        assert!(error.contains(flag) && error.contains(said), "{error}");
    }
}

#[test]
fn schedules_are_refused_by_their_phase() {
    let error = refused(&["train", "--schedule", "warmup:100,cosine"]);
    assert!(error.contains("cosine:STEPS[:FLOOR] as phase 2, not `cosine`"), "{error}");
}

#[test]
fn names_of_rules_that_others_use_are_met_with_flags() {
    for (name, flags) in [
        ("amsgrad", "--optimizer adamw --amsgrad"),
        ("adam_w", "--optimizer adamw"),
        ("sgd_momentum", "--optimizer momentum"),
        ("nesterov", "--optimizer momentum --nesterov"),
        ("rmsprop_centered", "--optimizer rmsprop --centered"),
    ] {
        for command in [&["train"][..], &["plan", "shapes.json"]] {
            let error = refused(&[command, &["--optimizer", name]].concat());
            let tip = format!("tip: `{flags}` asks for that rule here");
            assert!(error.contains(&tip) && error.matches("tip:").count() == 1, "{error}");
        }
    }
    assert!(!refused(&["train", "--optimizer", "zzz"]).contains("asks for that rule"));
}

#[test]
fn what_one_rank_leaves_without_effect_is_told_once() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let bench = ["bench", text(&shapes), "--rounds", "1"];
    for (command, flag) in [
        (&["train", "--epochs", "1"][..], "--ranks"),
        (&["plan", text(&shapes)], "--world"),
        (&bench, "--ranks"),
    ] {
        let flags = ["--zero", "2", "--bucket-cap-mib", "1"];
        let found = told(&[command, &[flag, "1"], &flags].concat());
        let note = "note: --zero, --bucket-cap-mib: no effect on one rank";
        assert_eq!(found.matches(note).count(), 1, "{command:?}: {found}");
        assert!(!told(&[command, &[flag, "2"], &flags].concat()).contains("no effect"));
        assert!(!told(&[command, &[flag, "1"]].concat()).contains("no effect"));
    }
}

#[test]
fn the_naive_number_of_calls_is_that_of_the_naive_plan() {
    let run = |more: &[&str]| -> Value {
        serde_json::from_str(&ok(&[&["plan", SHAPES, "--json"], more].concat())).unwrap()
    };
    for flags in [
        "--world 4 --lanes 8",
        "--world 3 --lanes 8",
        "--world 3 --lanes 8 --zero 2",
        "--world 3 --lanes 8 --engine thread",
        "--world 4 --lanes 4 --dtype bf16 --zero 1",
        "--world 4 --lanes 8 --accumulate 2 --zero 3",
        "--world 4 --reduce-dtype bf16",
        "--world 4 --reduce-dtype bf16 --zero 2",
        "--world 4 --zero 1 --shard-group 2",
        "--world 4 --zero 3 --accumulate 3",
        "--world 4 --accumulate 3 --reduced per-micro-step",
        "--world 4 --zero 2 --owners tensors",
    ] {
        let flags: Vec<&str> = flags.split(' ').collect();
        let fused = run(&flags);
        let naive = run(&[&flags[..], &["--naive"]].concat());
        assert_eq!(fused["naive_collectives"], naive["collectives"], "{flags:?}");
        assert_eq!(naive["naive_collectives"], naive["collectives"], "{flags:?}");
        assert!(fused["collectives"].as_u64() < naive["collectives"].as_u64(), "{flags:?}");
    }
}

#[test]
fn a_loss_that_is_no_number_for_want_of_an_eps_says_so() {
    let train = ["train", "--epochs", "1"];
    let error = refused(&[&train[..], &["--eps", "0"]].concat());
    assert!(error.contains("; give an --eps above 0: without it a gradient of 0 is"), "{error}");
    let error = refused(&[&train[..], &["--optimizer", "sgd", "--lr", "1e30"]].concat());
    assert!(error.contains("; use a smaller --lr"), "{error}");
}

#[test]
fn numbers_that_f32_has_as_0_are_refused_unless_the_parameters_are_f64() {
    let train = ["train", "--epochs", "1"];
    for (flags, flag) in [
        (&["--eps", "1e-60"][..], "--eps"),
        (&["--lr", "1e-60"], "--lr"),
        (&["--weight-decay", "1e-60"], "--weight-decay"),
        (&["--lr-scale", "layer0=1e-60"], "--lr-scale layer0"),
        (&["--weight-decay-of", "layer0=1e-60"], "--weight-decay-of layer0"),
    ] {
        let error = refused(&[&train[..], flags].concat());
        let said = format!("error: {flag}: expected 0 or at least 1.4e-45, since parameters other");
        assert!(error.contains(&said) && error.contains("found 1e-60"), "{error}");
        ok(&[&train[..], flags, &["--dtype", "f64"]].concat());
    }
    ok(&[&train[..], &["--weight-decay", "0"]].concat());
}

#[test]
fn a_run_whose_every_rate_is_0_is_told_by_which_flag() {
    let train = ["train", "--epochs", "1"];
    for (flags, flag) in [
        (&["--lr", "0"][..], "--lr 0"),
        (&["--lr-scale", "layer=0"], "--lr-scale"),
        (&["--schedule", "cosine:0"], "--schedule cosine:0"),
        (&["--schedule", "constant:10:0"], "--schedule constant:10:0"),
    ] {
        let found = told(&[&train[..], flags].concat());
        let said = format!("; with {flag} the rate of every step is 0; give another");
        assert!(found.contains(&said) && !found.contains("try another --lr"), "{found}");
    }
}

#[test]
fn skipped_steps_and_what_was_dropped_are_counted_alike_on_any_ranks() {
    let train = ["train", "--epochs", "1", "--dtype", "f16", "--loss-scale"];
    let train = [&train[..], &["dynamic:start=1048576"]].concat();
    let printed = ok(&train);
    let said = "3 steps skipped, since a gradient was not finite; logs and checkpoints count the \
                other 42\n";
    assert!(printed.contains(said), "{printed}");
    for ranks in ["1", "2", "4"] {
        let printed = ok(&[&train[..], &["--lanes", "4", "--ranks", ranks]].concat());
        let said = "4 steps skipped, since a gradient was not finite; logs and checkpoints count \
                    the other 41; 16 micro-steps dropped with them\n";
        assert!(printed.contains(said), "{ranks}: {printed}");
    }
}

#[test]
fn one_lane_of_one_rank_keeps_one_sum() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let verify = ["verify", text(&shapes), "--lanes", "1", "--worlds", "1", "--json"];
    let found: Value = serde_json::from_str(&ok(&verify)).unwrap();
    assert!(found["runs"].as_array().unwrap().iter().all(|run| run["peak_sums"] == 1), "{found}");
}

#[test]
fn a_plan_predicts_what_it_knows_and_says_what_it_leaves_out() {
    let folder = Folder::new();
    let shapes = shapes(&folder);
    let plan = |more: &[&str]| ok(&[&["plan", text(&shapes), "--world"], more].concat());
    assert!(!plan(&["1"]).contains("predicted"));
    let left_out = "without this rank's update, as the speed of memory is not known";
    assert!(plan(&["2"]).contains(left_out));
    let known = plan(&["2", "--memory-gbs", "10"]);
    assert!(known.contains("this rank's update") && !known.contains(left_out), "{known}");
}

#[test]
fn large_powers_of_two_and_single_batches_are_told_right() {
    let printed = ok(&["train", "--epochs", "1", "--loss-scale", "2^60"]);
    assert!(printed.contains("loss scale 2^60\n"), "{printed}");
    let found = told(&["train", "--epochs", "1", "--accumulate", "4", "--batch", "1437"]);
    assert!(found.contains("an epoch has 1 batch, no multiple of 4"), "{found}");
}

#[test]
fn a_process_of_a_launcher_is_told_how_it_runs_alone() {
    let launch = ["launch", "-n", "2", "--"];
    let train = [env!("CARGO_BIN_EXE_fusestep"), "train", "--epochs", "1"];
    let error = refused(&[&launch[..], &train].concat());
    assert!(error.contains("`-- env FUSESTEP_ALONE=1 PROGRAM`"), "{error}");
    if cfg!(target_os = "linux") {
        ok(&[&launch[..], &["env", "FUSESTEP_ALONE=1"], &train].concat());
    }
}
