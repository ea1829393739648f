//! Bits of trained parameters, written down: `bits.txt` has a hash for each rule, ZeRO stage,
//! number of ranks, number of streams and moment of updates. Code may change, these may not.

use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::Path;

use fusestep::{
    Adagrad, AdamW, Adamax, Builder, Cpu, DType, Error, Kind, Lamb, Lars, Lion, LossScaling,
    Master, NAdam, ParamDesc, Precision, RmsProp, ScheduleFree, Session, Sgd, Shape,
};
use half::bf16;

/// Environment variable that has the table written anew instead of compared.
const BLESS: &str = "FUSESTEP_BLESS";

/// Names and numels, around a vector, a leaf of the fixed tree and a chunk.
const TENSORS: [(&str, usize); 6] = [
    ("layer0.weight", 70_001),
    ("layer0.bias", 17),
    ("layer1.weight", 5_000),
    ("layer1.bias", 1),
    ("layer2.weight", 1_024),
    ("layer2.bias", 0),
];
const STEPS: usize = 4;

/// Ranks of a run, their share and streams, and the moment of updates.
#[derive(Clone, Copy)]
struct Shared {
    ranks: usize,
    zero: u8,
    streams: usize,
    updated: Updated,
}

#[derive(Clone, Copy, PartialEq)]
enum Updated {
    InStep,
    InBackward,
}

/// Runs of every rule.
const RUNS: [Shared; 5] = [
    Shared { ranks: 1, zero: 0, streams: 0, updated: Updated::InStep },
    Shared { ranks: 2, zero: 0, streams: 0, updated: Updated::InStep },
    Shared { ranks: 2, zero: 1, streams: 2, updated: Updated::InStep },
    Shared { ranks: 3, zero: 2, streams: 0, updated: Updated::InStep },
    Shared { ranks: 3, zero: 3, streams: 1, updated: Updated::InStep },
];

/// Runs of rules that may update in backward on several ranks.
const IN_BACKWARD: [Shared; 3] = [
    Shared { ranks: 1, zero: 0, streams: 0, updated: Updated::InBackward },
    Shared { ranks: 2, zero: 0, streams: 2, updated: Updated::InBackward },
    Shared { ranks: 3, zero: 2, streams: 0, updated: Updated::InBackward },
];

/// A number from -1 to 1, the same on every machine.
fn noise(key: [usize; 4]) -> f32 {
    let mut hash = 0x9e37_79b9_7f4a_7c15_u64;
    for word in key {
        hash = (hash ^ word as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 32;
    }
    (hash >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn params(dtype: DType) -> Vec<ParamDesc> {
    let describe = |(name, numel): (&str, usize)| {
        let shape = Shape::new([numel as u64]).unwrap();
        let mut param = ParamDesc::new(name, shape, dtype);
        if name.ends_with("bias") {
            param.lr_scale = 0.5;
            param.weight_decay = Some(0.0);
        }
        param
    };
    TENSORS.map(describe).to_vec()
}

/// Trains and returns the hash of all parameters, which every rank has at the end.
fn train(
    opt: &mut Session<'_>,
    dtype: DType,
    rank: usize,
    micro_steps: usize,
) -> Result<u64, Error> {
    let rounded = |values: &[f32]| values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
    for (at, (name, numel)) in TENSORS.into_iter().enumerate() {
        let values: Vec<f32> = (0..numel).map(|i| noise([0, 0, at, i])).collect();
        match dtype {
            DType::BF16 => opt.set_param(name, &rounded(&values))?,
            _ => opt.set_param(name, &values)?,
        }
    }
    for step in 1..=STEPS * micro_steps {
        for (at, (name, numel)) in TENSORS.into_iter().enumerate().rev() {
            // Missing on one rank in one step, and on all in another.
            if (rank, step, at) == (0, 2, 2) || (step, at) == (3, 1) {
                continue;
            }
            let grad: Vec<f32> = (0..numel).map(|i| noise([rank + 1, step, at, i])).collect();
            match dtype {
                DType::BF16 => opt.push_grad(name, &rounded(&grad))?,
                _ => opt.push_grad(name, &grad)?,
            }
        }
        opt.step()?;
    }
    opt.flush()?;
    let gathered = opt.gather(&TENSORS.map(|(name, _)| name))?;
    let bytes = (0..TENSORS.len()).flat_map(|at| gathered.bytes(at));
    // FNV-1a.
    Ok(bytes.fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    }))
}

/// One kind of run in one line of the table.
fn line<K: Kind>(
    text: &mut String,
    what: &str,
    make: impl Fn() -> Builder<K> + Sync,
    shared: Shared,
) {
    line_of(text, what, DType::F32, 1, make, shared);
}

fn line_of<K: Kind>(
    text: &mut String,
    what: &str,
    dtype: DType,
    micro_steps: usize,
    make: impl Fn() -> Builder<K> + Sync,
    shared: Shared,
) {
    let Shared { ranks, zero, streams, updated } = shared;
    let build = || {
        let builder = make().zero(zero);
        let builder = if ranks > 1 { builder.comm_streams(streams) } else { builder };
        let builder = match updated {
            Updated::InStep if ranks == 1 => builder,
            Updated::InStep => builder.bucket_cap_mib(0.05),
            Updated::InBackward => builder.bucket_cap_mib(0.05).update_in_backward(),
        };
        // Ranks that average send no gradients, so that how they would be sent is refused.
        let builder = builder.options(|step| {
            if step.averages() {
                step.comm_streams = None;
                step.bucket_cap_mib = step.bucket_cap_mib.filter(|_| step.update_in_backward);
            }
        });
        (builder, params(dtype), Cpu::with_threads(NonZeroUsize::MIN))
    };
    let hashes = if ranks == 1 {
        let (builder, params, cpu) = build();
        let built = builder.build(&params, cpu);
        built.and_then(|mut opt| Ok(vec![train(&mut opt, dtype, 0, micro_steps)?]))
    } else {
        fusestep::threads(ranks, |comm| {
            let rank = comm.rank();
            let (builder, params, cpu) = build();
            train(&mut builder.on(comm).build(&params, cpu)?, dtype, rank, micro_steps)
        })
    };
    let hashes = hashes.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{what}: {hashes:x?}");
    let when = if updated == Updated::InBackward { "in backward" } else { "in step" };
    let _ = writeln!(
        text,
        "{what:24} ranks {ranks}  zero {zero}  streams {streams}  {when:11}  {:016x}",
        hashes[0]
    );
}

fn rule<K: Kind>(text: &mut String, what: &str, make: impl Fn() -> Builder<K> + Sync) {
    for shared in RUNS {
        line(text, what, &make, shared);
    }
}

fn element_wise<K: Kind>(text: &mut String, what: &str, make: impl Fn() -> Builder<K> + Sync) {
    rule(text, what, &make);
    for shared in IN_BACKWARD {
        line(text, what, &make, shared);
    }
}

#[test]
fn trained_parameters_have_the_bits_that_are_written_down() {
    let mut text = String::new();
    let table = &mut text;
    element_wise(table, "adamw", || AdamW::new(1e-2));
    element_wise(table, "sgd", || Sgd::new(1e-2).settings(|sgd| sgd.momentum = 0.9));
    element_wise(table, "lion", || Lion::new(1e-3));
    rule(table, "adagrad", || Adagrad::new(1e-2));
    rule(table, "rmsprop", || RmsProp::new(1e-2));
    rule(table, "schedule_free", || ScheduleFree::new(1e-2));
    rule(table, "lars", || Lars::new(1e-1));
    rule(table, "lamb", || Lamb::new(1e-2));
    rule(table, "adamax", || Adamax::new(1e-2));
    rule(table, "nadam", || NAdam::new(1e-2));
    let names = || TENSORS.map(|(name, _)| name).into_iter().filter(|name| name.contains("bias"));
    let grouped = || AdamW::new(1e-2).group(names(), fusestep::fused_sgd::Sgd::default());
    let scaled = || AdamW::new(1e-2).clip_norm(0.5).loss_scale(LossScaling::fixed(4.0));
    let precision = Precision { master: Master::F32, ..Precision::default() };
    let masters = || AdamW::new(1e-2).precision(precision);
    for shared in RUNS {
        line(table, "adamw, clip, loss scale", scaled, shared);
        line(table, "adamw, group of sgd", grouped, shared);
        line_of(table, "adamw, bf16, masters", DType::BF16, 1, masters, shared);
        line_of(
            table,
            "lamb, accumulate 3",
            DType::F32,
            3,
            || Lamb::new(1e-2).accumulate(3),
            shared,
        );
    }
    for shared in [RUNS[1], Shared { ranks: 3, streams: 2, ..RUNS[1] }] {
        line(table, "adamw, local_sgd 2", || AdamW::new(1e-2).local_sgd(2), shared);
    }
    compare(&text);
}

fn compare(found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bits.txt");
    if std::env::var_os(BLESS).is_some() {
        std::fs::write(&path, found).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    for (expected, found) in expected.lines().zip(found.lines()) {
        assert!(found == expected, "other bits\nexpected: {expected}\nfound:    {found}");
    }
    assert_eq!(found.lines().count(), expected.lines().count());
}
