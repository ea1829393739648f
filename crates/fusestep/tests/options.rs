//! The table of settings: ranges, refusals, and the page drawn from it.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::Path;

use fusestep::fused_adam::Adam;
use fusestep::fused_sgd::Sgd;
use fusestep::launch::LaunchLimits;
use fusestep::planner::{Reach, TableKind, Topology};
use fusestep::{
    AdamW, Alone, Cpu, DType, OptionError, OwnRule, ParamDesc, Row, Section, Shape, StepOptions,
    Visit,
};

/// Sets one setting from a text.
struct Set<'a> {
    name: &'a str,
    text: &'a str,
}

impl Visit for Set<'_> {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        if row.name == self.name { (row.set)(self.text) } else { Ok(()) }
    }
}

fn set(options: &mut StepOptions, name: &str, text: &str) -> Result<(), OptionError> {
    options.each(&mut Set { name, text })
}

/// Options with these settings.
fn with(settings: &[[&str; 2]]) -> StepOptions {
    let mut options = StepOptions::default();
    for [name, text] in settings {
        set(&mut options, name, text).expect("a value in range");
    }
    options
}

fn refusal(settings: &[[&str; 2]], ranks: usize) -> Option<String> {
    with(settings).check(ranks).err().map(|error| error.to_string())
}

/// Every row, by what the page says of it.
#[derive(Default)]
struct Page {
    names: Vec<&'static str>,
    section: Option<Section>,
    text: String,
}

impl Visit for Page {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        self.names.push(row.name);
        if self.section != Some(row.section) {
            self.section = Some(row.section);
            let title = row.section.title();
            write!(self.text, "\n## {title}\n\n{COLUMNS}").expect("a string takes any text");
        }
        assert!(row.says.ends_with('.') && !row.says.is_empty(), "{}: {}", row.name, row.says);
        let default = row.value.unwrap_or_else(|| "none".to_owned());
        let range = match row.choices.as_slice() {
            [] => row.range.into_owned(),
            choices => {
                let texts = choices.iter().map(|named| format!("`{}`: {}", named.name, named.says));
                texts.collect::<Vec<_>>().join("; ")
            }
        };
        let mut notes = Vec::new();
        match row.alone {
            Alone::Acts => {}
            Alone::ActsWith(other) => notes.push(format!("ranks, or `{other}`")),
            Alone::Idle => notes.push("ranks".to_owned()),
        }
        notes.extend(row.needs.map(|need| {
            let works = need.works;
            let space = if works.is_empty() { "" } else { " " };
            format!("has no effect without `{}`{space}{works}", need.with)
        }));
        notes.extend(row.conflicts.iter().map(|conflict| {
            let at = match (conflict.at, conflict.except) {
                (Some(at), _) => format!(" {at}"),
                (None, Some(except)) => format!(" other than {except}"),
                (None, None) => String::new(),
            };
            let ranks = if conflict.from_ranks > 1 { ", on several ranks" } else { "" };
            let unless = conflict.unless.map(|name| format!(", unless `{name}` is set"));
            let unless = unless.unwrap_or_default();
            format!("not with `{}`{at}{ranks}{unless}: {}", conflict.with, conflict.why)
        }));
        let notes = notes.join("; ");
        let (name, says) = (row.name, row.says);
        writeln!(self.text, "| `{name}` | {default} | {range} | {says} | {notes} |")
            .expect("a string takes any text");
        Ok(())
    }
}

#[test]
fn names_are_distinct_and_each_default_is_in_range() {
    let mut page = Page::default();
    StepOptions::default().each(&mut page).expect("a page");
    let distinct: HashSet<_> = page.names.iter().collect();
    assert_eq!(distinct.len(), page.names.len());
    StepOptions::default().check(4).expect("defaults");
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    for [name, text] in [
        ["clip_norm", "0"],
        ["clip_norm", "NaN"],
        ["loss_scale", "3"],
        ["accumulate", "0"],
        ["accumulate", "1.5"],
        ["accumulated", "median"],
        ["zero", "4"],
        ["shard_group", "0"],
        ["bucket_cap_mib", "-1"],
        ["comm_streams", "1025"],
        ["local_sgd", "0"],
        ["update_norms", "yes"],
        ["threads", "0"],
        ["schedule", "warmup"],
        ["exclude", ""],
        ["lr_scale", "bias"],
        ["trust_of", "bias=none"],
    ] {
        let mut options = StepOptions::default();
        let error = set(&mut options, name, text).expect_err(name).to_string();
        assert!(error.starts_with(&format!("{name}: expected ")), "{error}");
        assert!(error.ends_with(&format!("found `{text}`")), "{error}");
        assert_eq!(options, StepOptions::default(), "{name} {text}");
    }
}

#[test]
fn fields_out_of_range_are_refused_when_a_planner_is_made() {
    let options = StepOptions { zero: 7, ..StepOptions::default() };
    let error = options.planner(&[], Topology::SOLO, LaunchLimits::default()).expect_err("stage 7");
    assert_eq!(error.to_string(), "zero: expected a whole number from 0 to 3, found `7`");
}

#[test]
fn settings_without_effect_are_refused() {
    for ([name, text], needs) in [
        (["accumulated", "sum"], "accumulate of 2 or more too, found 1"),
        (["reduced", "per_micro_step"], "accumulate of 2 or more too, found 1"),
        (["shard_group", "2"], "zero of 1 or more too, found 0"),
        (["owners", "tensors"], "zero of 1 or more too, found 0"),
        (["broadcast_cap_mib", "2"], "owners tensors too, found elements"),
        (["local_sgd_begin", "5"], "local_sgd too, found none"),
        (["local_sgd_interval", "adaptive"], "local_sgd too, found none"),
        (["keep_f32", "head"], "state_dtype int8 too, found f32"),
    ] {
        let found = refusal(&[[name, text]], 4);
        let expected = format!("{name}: expected {needs}; it has no effect otherwise");
        assert_eq!(found, Some(expected));
    }
    let beside_bf16 = refusal(&[["keep_f32", "head"], ["state_dtype", "bf16"]], 1);
    let expected =
        "keep_f32: expected state_dtype int8 too, found bf16; it has no effect otherwise";
    assert_eq!(beside_bf16.as_deref(), Some(expected));
    assert_eq!(refusal(&[["keep_f32", "head"], ["state_dtype", "int8"]], 1), None);
    assert_eq!(refusal(&[["accumulated", "sum"], ["accumulate", "2"]], 4), None);
    assert_eq!(refusal(&[["shard_group", "2"], ["zero", "1"]], 4), None);
}

#[test]
fn types_of_state_are_refused_where_no_rule_keeps_any() {
    let sgd = Sgd { momentum: 0.0, ..Sgd::default() };
    let stateless = StepOptions { rule: sgd.into(), ..with(&[["state_dtype", "bf16"]]) };
    let error = stateless.check(1).expect_err("no state");
    let said = "state_dtype: expected a rule that keeps state, found sgd, which keeps none; leave \
                it out";
    assert_eq!((error.setting(), error.to_string()), ("state_dtype", said.to_owned()));
    // State of a group's rule has the type.
    let groups = vec![OwnRule::containing(["head"], Adam::default())];
    StepOptions { groups, ..stateless }.check(1).expect("a rule with state");
}

#[test]
fn caps_of_too_many_buckets_are_refused_with_one_that_works() {
    let shape = Shape::new([1 << 20]).expect("a shape");
    let params = [ParamDesc::new("w", shape, DType::F32)];
    let options = with(&[["bucket_cap_mib", "0.0001"]]);
    let on = |world| Topology { world, ..Topology::SOLO };
    let planned = |options: &StepOptions, world| {
        let planner = options.planner(&params, on(world), LaunchLimits::default());
        planner.map(|_| ()).map_err(|error| error.to_string())
    };
    let said = "bucket_cap_mib: expected at most 16,384 buckets of this model's gradients, found \
                some 40,330; give 0.00025 or more";
    assert_eq!(planned(&options, 2), Err(said.to_owned()));
    let cut = StepOptions { update_in_backward: true, ..options.clone() };
    assert_eq!(planned(&cut, 1), Err(said.to_owned()));
    assert_eq!(planned(&options, 1), Ok(()));
    let works = StepOptions { bucket_cap_mib: Some(0.00025), ..options };
    assert_eq!(planned(&works, 2), Ok(()));
}

#[test]
fn settings_that_contradict_are_refused_by_both_names() {
    let in_backward = ["update_in_backward", "true"];
    for other in [["clip_norm", "1"], ["loss_scale", "dynamic"], ["update_norms", "true"]] {
        let found = refusal(&[in_backward, other], 1).expect("a conflict");
        assert!(found.starts_with(&format!("update_in_backward and {}: ", other[0])), "{found}");
    }
    assert!(refusal(&[in_backward, ["zero", "3"]], 2).is_some());
    assert_eq!(refusal(&[in_backward, ["zero", "2"]], 2), None);
    assert_eq!(refusal(&[in_backward, ["zero", "3"]], 1), None);
    assert!(refusal(&[["local_sgd", "4"], ["zero", "1"]], 1).is_some());
    let local = ["local_sgd", "4"];
    for other in [["bucket_cap_mib", "1"], ["comm_streams", "2"], ["separate", "true"]] {
        let found = refusal(&[local, other], 2).expect("a conflict");
        let said = format!("local_sgd and {}: ranks average parameters and send no", other[0]);
        assert!(found.starts_with(&said), "{found}");
    }
    let per_micro_step = [["reduced", "per_micro_step"], ["accumulate", "2"]];
    let found = refusal(&[&[local], &per_micro_step[..]].concat(), 2).expect("a conflict");
    assert!(found.starts_with("local_sgd and reduced: "), "{found}");
    // Updates in backward are cut by the cap.
    assert_eq!(refusal(&[local, ["bucket_cap_mib", "1"], in_backward], 2), None);
    assert!(refusal(&[["separate", "true"], ["naive", "true"]], 2).is_some());
    assert!(refusal(&[["separate", "true"], ["comm_streams", "2"]], 2).is_some());
    assert_eq!(refusal(&[["separate", "true"], ["comm_streams", "0"]], 2), None);
}

#[test]
fn settings_of_ranks_are_refused_in_a_process_alone() {
    for [name, text] in [
        ["zero", "1"],
        ["bucket_cap_mib", "0.5"],
        ["comm_streams", "0"],
        ["separate", "true"],
        ["local_sgd", "4"],
        ["distributed", "head"],
        ["initial", "own_and_equal"],
        ["reduce_dtype", "bf16"],
        ["reduce_dtype", "f16"],
    ] {
        let error = with(&[[name, text]]).check_alone().expect_err(name).to_string();
        let expected = format!("{name} of {text}: expected an optimizer on ranks");
        assert!(error.starts_with(&expected), "{error}");
    }
    let in_backward = with(&[["bucket_cap_mib", "0.5"], ["update_in_backward", "true"]]);
    assert_eq!(in_backward.check_alone(), Ok(()));
    assert_eq!(with(&[["clip_norm", "1"], ["accumulate", "4"]]).check_alone(), Ok(()));
    assert_eq!(with(&[["reduce_dtype", "f32"]]).check_alone(), Ok(()));
}

#[test]
fn shard_groups_change_no_bit() {
    let shape = Shape::new([300]).expect("a shape");
    let params = [ParamDesc::new("w", shape, DType::F32)];
    let trained = |group: Option<usize>| {
        let ranks = fusestep::threads(4, |comm| {
            let rank = comm.rank();
            let built = AdamW::new(1e-2).options(|step| (step.zero, step.shard_group) = (1, group));
            let mut optimizer = built.on(comm).build(&params, Cpu::new())?;
            for step in 0..3 {
                let gradient = vec![(rank + 1) as f32 * (step as f32 - 0.5); 300];
                optimizer.push_grad("w", &gradient)?;
                optimizer.step()?;
            }
            Ok::<_, fusestep::Error>(optimizer.param::<f32>("w")?.to_vec())
        });
        ranks.expect("four ranks")
    };
    let whole = trained(None);
    assert!(whole.iter().all(|param| *param == whole[0]));
    // Small integers times halves: sums in groups and across them are exact.
    assert_eq!(trained(Some(2)), whole);
}

#[test]
fn threads_are_the_device_s() {
    let params = [ParamDesc::new("w", Shape::new([3]).expect("a shape"), DType::F32)];
    let built = AdamW::new(1e-2).options(|step| step.threads = Some(2)).build(&params, Cpu::new());
    let error = built.expect_err("threads of the step").to_string();
    assert!(error.starts_with("threads: expected none"), "{error}");
}

#[test]
fn streams_are_chosen_by_how_ranks_reach_each_other() {
    let mut topology = Topology::new(0, 2).expect("two ranks");
    assert_eq!(StepOptions::default().streams(topology), 2);
    assert_eq!(with(&[["naive", "true"]]).streams(topology), 0);
    assert_eq!(with(&[["local_sgd", "4"]]).streams(topology), 0);
    assert_eq!(with(&[["comm_streams", "5"]]).streams(topology), 5);
    topology.reach = Reach::SharedMemory;
    assert_eq!(StepOptions::default().streams(topology), 0);
}

#[test]
fn tables_are_chosen_by_the_launches_of_a_device() {
    let shape = || Shape::new([4]).expect("a shape");
    let params: Vec<_> =
        (0..1000).map(|index| ParamDesc::new(format!("w{index}"), shape(), DType::F32)).collect();
    let on_host = LaunchLimits::default();
    let on_device = LaunchLimits { keeps_tables: true, ..on_host };
    let table = |options: &StepOptions, count: usize, topology: Topology, limits| {
        let (params, of) = (&params[..count], options.planner(&params[..count], topology, limits));
        of.expect("a planner").plan_for(params, topology).expect("a plan").table()
    };
    let (usual, ranks) = (StepOptions::default(), Topology::new(0, 2).expect("two ranks"));
    // A launch takes 681 tensors of AdamW.
    assert_eq!(table(&usual, 1000, Topology::SOLO, on_device), TableKind::Resident);
    assert_eq!(table(&usual, 600, Topology::SOLO, on_device), TableKind::Arguments);
    assert_eq!(table(&usual, 1000, Topology::SOLO, on_host), TableKind::Arguments);
    assert_eq!(table(&usual, 1000, ranks, on_device), TableKind::Arguments);
    let given = with(&[["tables", "arguments"]]);
    assert_eq!(table(&given, 1000, Topology::SOLO, on_device), TableKind::Arguments);
    let given = with(&[["tables", "resident"]]);
    assert_eq!(table(&given, 1, Topology::SOLO, on_host), TableKind::Resident);
    let capped = with(&[["argument_bytes", "400"]]);
    assert_eq!(table(&capped, 600, Topology::SOLO, on_device), TableKind::Resident);
}

#[test]
fn patterns_reach_the_parameters_whose_names_contain_them() {
    let shape = || Shape::new([4]).expect("a shape");
    let mut params =
        ["a.weight", "a.bias", "b.bias"].map(|name| ParamDesc::new(name, shape(), DType::F32));
    let mut options =
        with(&[["exclude", "bias"], ["lr_scale", "b.=0.5"], ["trust_of", "a.w=plain"]]);
    let error = options.describe(&mut params).expect_err("a rule without trust ratios");
    let expected = "trust_of of `a.w`: expected parameters of a rule that scales by trust ratios \
                    (lars, lamb), found adamw, which has none; leave it out";
    assert_eq!(error.to_string(), expected);
    options.rule = fusestep::lamb::Lamb::default().into();
    options.describe(&mut params).expect("patterns of names");
    // A group's rule counts for its own parameters.
    options.rule = fusestep::fused_adam::Adam::default().into();
    let group = OwnRule::containing(["a."], fusestep::lamb::Lamb::default());
    let mut grouped = StepOptions { groups: vec![group], ..options.clone() };
    grouped.describe(&mut params.clone()).expect("a group with trust ratios");
    grouped.trust_of[0].pattern = "b.".to_owned();
    grouped.describe(&mut params.clone()).expect_err("no parameter of the group");
    let decays = params.each_ref().map(|param| param.weight_decay);
    assert_eq!(decays, [None, Some(0.0), Some(0.0)]);
    assert_eq!(params.each_ref().map(|param| param.lr_scale), [1.0, 1.0, 0.5]);
    let unmatched = with(&[["lr_scale", "norm=2"]]).describe(&mut params).expect_err("no norm");
    let expected = "lr_scale: expected a part of a parameter's name such as `a.weight` or `a.bias` \
                    or `b.bias`, found `norm`, which is in none of 3; leave it out";
    assert_eq!(unmatched.to_string(), expected);

    let error = AdamW::new(1e-3)
        .options(|step| step.exclude.push("norm".to_owned()))
        .build(&params, Cpu::new())
        .expect_err("a pattern that names nothing")
        .to_string();
    assert!(error.starts_with("exclude: expected a part of a parameter's name"), "{error}");
}

/// With `FUSESTEP_WRITE=1` the page is written in place of being compared.
#[test]
fn the_page_of_settings_is_the_table() {
    let mut page = Page::default();
    StepOptions::default().each(&mut page).expect("a page");
    let text = format!("{HEAD}{}", page.text);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
    if std::env::var_os("FUSESTEP_WRITE").is_some() {
        std::fs::write(&path, &text).expect("a page that can be written");
    }
    let found = std::fs::read_to_string(&path).expect("docs/settings.md");
    assert!(found == text, "docs/settings.md is stale; run this test with FUSESTEP_WRITE=1");
}

const HEAD: &str = "# Settings of a step

Every setting of `fusestep::StepOptions`, drawn from its table. The update rule, parameter groups
and precisions of single dtypes are fields of their own; each crate of a rule has its settings. The
command line writes `-` for `_`: `--clip-norm 1`. Builders and candle take `step.clip_norm =
Some(1.0)`, Python `clip_norm=1.0`.
";

const COLUMNS: &str = "| Setting | Default | Values | Meaning | Goes with |
|---|---|---|---|---|
";

#[test]
fn as_many_micro_batches_in_rank_order_are_shared_out_evenly_or_not_at_all() {
    let lanes = StepOptions { lanes: Some(6), accumulate: 2, zero: 1, ..StepOptions::default() };
    assert_eq!(lanes.micro_batches(), 12);
    for (world, of_rank) in [(1, Some(12)), (3, Some(4)), (4, Some(3)), (12, Some(1)), (5, None)] {
        let found = lanes.in_rank_order(world);
        let expected =
            of_rank.map(|accumulate| StepOptions { lanes: None, accumulate, ..lanes.clone() });
        assert_eq!(found, expected, "{world}");
    }
    assert_eq!(lanes.in_rank_order(0), None);
    assert_eq!(StepOptions::default().in_rank_order(1), None);
}
