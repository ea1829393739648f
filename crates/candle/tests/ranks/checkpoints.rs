//! One checkpoint for model, optimizer, position and random state: gone on from on any number of
//! ranks, and read by others.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder, VarMap};
use fusestep_candle::{
    AdamW, Communicator, Fused, LossScale, Options, ParamsLion, ParamsSgd, Sgd, Solo, group,
};
use fusestep_collective::Collectives;

use super::{Shared, all_bits, bits, gradients, on_ranks, sharing, step_ranked, step_whole, vars};

fn options() -> Options {
    let lion = ParamsLion { lr: 3e-4, ..ParamsLion::default() };
    Options {
        groups: vec![group(["embedding"], lion)],
        clip_norm: Some(0.5),
        loss_scale: Some(LossScale::fixed(1.0).unwrap()),
        schedule: Some("warmup:3,polynomial:5:2".parse().unwrap()),
        ..Options::default()
    }
}

fn adamw(vars: &[(String, Var)], options: &Options) -> AdamW {
    AdamW::with_options(vars.to_vec(), ParamsAdamW::default(), options).unwrap()
}

/// The model's file of the checkpoint that counts.
fn model_file(folder: &Path) -> PathBuf {
    let manifest = fusestep_checkpoint::Manifest::read(folder).unwrap();
    folder.join(manifest.generation).join("model.safetensors")
}

/// Goes on from the folder, steps up to `until` with a save after each two steps; all variables.
fn part(comm: &mut dyn Communicator, folder: &Path, shared: Shared, until: u64) -> Vec<Vec<u64>> {
    // Other first values: what counts is in the checkpoint.
    let vars = vars(DType::F32, 70 + comm.world_size() as u64);
    if !folder.join("manifest.json").exists() {
        for ((_, var), (_, first)) in vars.iter().zip(super::vars(DType::F32, 7)) {
            var.set(first.as_tensor()).unwrap();
        }
    }
    comm.barrier().unwrap();
    let rank = comm.rank();
    let mut ranked = adamw(&vars, &sharing(&options(), shared)).on(comm).unwrap();
    let first = ranked.resume(folder).unwrap() as u64;
    for step in first..until {
        step_ranked(&mut ranked, shared, step..step + 1).unwrap();
        ranked.remember("rng", format!("after {step}"));
        let begun = ranked.checkpoint_every(2, folder, step as usize).unwrap();
        assert_eq!(begun, step % 2 == 1, "rank {rank}");
    }
    ranked.finish_saves().unwrap();
    all_bits(&vars)
}

#[test]
fn a_run_goes_on_with_the_same_bits_on_any_number_of_ranks() {
    let whole = {
        let vars = vars(DType::F32, 7);
        let mut fused = adamw(&vars, &options());
        step_whole(&mut fused, &vars, 0..6).unwrap();
        all_bits(&vars)
    };
    let shared = |world, zero, micro| Shared { world, zero, micro };
    let begins = [shared(1, 0, 1), shared(2, 2, 1), shared(4, 1, 2), shared(4, 3, 1)];
    let ends = [shared(1, 1, 2), shared(2, 1, 1), shared(4, 2, 1), shared(2, 3, 2)];
    for begin in begins {
        for end in ends {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path();
            let half = on_ranks(begin.world, |comm| part(comm, path, begin, 4));
            let full = on_ranks(end.world, |comm| part(comm, path, end, 6));
            assert!(half[0] != whole);
            assert!(full.iter().all(|rank| *rank == whole), "{begin:?} {end:?}");
        }
    }
}

#[test]
fn one_process_on_borrowed_memory_and_ranks_share_checkpoints() {
    let whole = {
        let vars = vars(DType::F32, 7);
        let mut fused = adamw(&vars, &options());
        step_whole(&mut fused, &vars, 0..6).unwrap();
        all_bits(&vars)
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let begun = vars(DType::F32, 7);
    let mut fused = adamw(&begun, &options());
    assert_eq!(fused.resume(path).unwrap(), 0);
    for step in 0..2 {
        step_whole(&mut fused, &begun, step..step + 1).unwrap();
        fused.remember("rng", format!("after {step}"));
        let saves = fused.checkpoint_every(2, path, step as usize).unwrap();
        assert_eq!(saves, step == 1);
    }
    // Dropped, it completes its save.
    drop(fused);
    let shared = Shared { world: 2, zero: 2, micro: 1 };
    on_ranks(2, |comm| part(comm, path, shared, 4));
    let ended = vars(DType::F32, 99);
    let mut fused = adamw(&ended, &options());
    assert_eq!(fused.resume(path).unwrap(), 4);
    assert_eq!(fused.remembered("rng"), Some("after 3"));
    step_whole(&mut fused, &ended, 4..6).unwrap();
    assert!(all_bits(&ended) == whole);
}

#[test]
fn candle_reads_the_model_as_any_file_of_its_own() {
    for world in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let shared = Shared { world, zero: 2, micro: 1 };
        let values = on_ranks(world, |comm| part(comm, path, shared, 2));
        let file = model_file(path);
        let loaded: HashMap<String, Tensor> =
            candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        let vars = vars(DType::F32, 1);
        assert_eq!(loaded.len(), vars.len());
        for ((name, var), expected) in vars.iter().zip(&values[0]) {
            assert_eq!(loaded[name].dims(), var.dims());
            assert_eq!(bits(&loaded[name]), *expected);
        }
        // As a program that only evaluates builds its model.
        let files = [file];
        let vb = VarBuilder::from_tensors(loaded, DType::F32, &Device::Cpu);
        let head = candle_nn::linear(9, 40, vb.pp("nothing"));
        assert!(head.is_err());
        let mut varmap = VarMap::new();
        let from = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let weight = from.get((40, 9), "head.weight").unwrap();
        let before = bits(&weight);
        varmap.load(&files[0]).unwrap();
        assert_eq!(bits(&from.get((40, 9), "head.weight").unwrap()), values[0][6]);
        assert_ne!(before, values[0][6]);
    }
}

#[test]
fn a_checkpoint_of_another_schedule_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let own = vars(DType::F32, 7);
    let mut fused = adamw(&own, &options());
    step_whole(&mut fused, &own, 0..1).unwrap();
    fused.save_checkpoint(folder.path(), 1).unwrap();
    let unscheduled = Options { schedule: None, ..options() };
    let error = adamw(&own, &unscheduled).resume(folder.path());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("found `warmup:3,polynomial:5:2`"), "{error}");
}

#[test]
fn a_checkpoint_of_another_model_or_rule_is_refused_tensor_by_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let own = vars(DType::F32, 7);
    let mut fused = adamw(&own, &options());
    step_whole(&mut fused, &own, 0..1).unwrap();
    fused.save_checkpoint(folder.path(), 1).unwrap();

    let other_model = || {
        let mut other = vars(DType::F32, 8);
        other.retain(|(name, _)| name != "body.0.bias");
        let grown = Tensor::zeros((41, 9), DType::F32, &Device::Cpu).unwrap();
        other[5].1 = Var::from_tensor(&grown).unwrap();
        assert_eq!(other[5].0, "head.weight");
        other
    };
    let other = other_model();
    let before = all_bits(&other);
    let mut wrong = adamw(&other, &options());
    let error = wrong.resume(folder.path()).unwrap_err().to_string();
    for named in ["head.weight@param", "[41, 9]", "[40, 9]", "body.0.bias@param"] {
        assert!(error.contains(named), "{named}: {error}");
    }
    assert_eq!(all_bits(&other), before);
    let errors = on_ranks(2, |comm| {
        let mut wrong = adamw(&other_model(), &options()).on(comm).unwrap();
        wrong.resume(folder.path()).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("head.weight@param")), "{errors:?}");

    let same = vars(DType::F32, 8);
    let error = adamw(&same, &Options::default()).resume(folder.path());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("embedding.weight") && error.contains("lion"), "{error}");
    let mut sgd = Sgd::new(same.clone(), ParamsSgd::default()).unwrap();
    let error = sgd.resume(folder.path()).unwrap_err().to_string();
    assert!(error.contains("`optimizer`: expected sgd, found adamw"), "{error}");
    let bare: Vec<Var> = same.into_iter().map(|(_, var)| var).collect();
    let mut unnamed = Fused::new(bare, ParamsAdamW::default()).unwrap();
    for error in [
        unnamed.resume(folder.path()).unwrap_err(),
        unnamed.save_checkpoint(folder.path(), 1).unwrap_err(),
    ] {
        assert!(error.to_string().contains("build the optimizer from the VarMap"), "{error}");
    }
}

/// Makes the next commit of the folder's checkpoint impossible: a folder takes the manifest's
/// place.
fn block(folder: &Path) {
    std::fs::rename(folder.join("manifest.json"), folder.join("kept.json")).unwrap();
    std::fs::create_dir(folder.join("manifest.json")).unwrap();
}

fn unblock(folder: &Path) {
    std::fs::remove_dir(folder.join("manifest.json")).unwrap();
    std::fs::rename(folder.join("kept.json"), folder.join("manifest.json")).unwrap();
}

#[test]
fn an_error_of_a_save_behind_is_the_next_steps_and_training_goes_on() {
    for world in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        on_ranks(world, |comm| {
            let rank = comm.rank();
            let vars = vars(DType::F32, 7);
            let mut ranked = adamw(&vars, &Options::default()).on(comm).unwrap();
            let shared = Shared { world, zero: 0, micro: 1 };
            step_ranked(&mut ranked, shared, 0..1).unwrap();
            ranked.save_checkpoint(path, 1).unwrap();
            if rank == 0 {
                block(path);
            }
            ranked.communicator().barrier().unwrap();
            assert!(ranked.checkpoint_every(1, path, 0).unwrap());
            // It fails when the disk says so: at one of the next steps, on all ranks in the same.
            let before = loop {
                let before = all_bits(&vars);
                match step_ranked(&mut ranked, shared, 1..2) {
                    Ok(()) => std::thread::sleep(std::time::Duration::from_millis(1)),
                    Err(error) => {
                        let error = error.to_string();
                        assert!(error.contains("manifest"), "{error}");
                        break before;
                    }
                }
            };
            assert!(all_bits(&vars) == before, "a step that failed has changed variables");
            ranked.communicator().barrier().unwrap();
            if rank == 0 {
                unblock(path);
            }
            ranked.communicator().barrier().unwrap();
            step_ranked(&mut ranked, shared, 1..2).unwrap();
            assert!(all_bits(&vars) != before);
            ranked.checkpoint_every(1, path, 8).unwrap();
            // Dropped, it completes its save with the others.
            drop(ranked);
            let mut again =
                adamw(&super::vars(DType::F32, 5), &Options::default()).on(comm).unwrap();
            assert_eq!(again.resume(path).unwrap(), 9);
        });
    }
}

#[test]
fn one_run_saves_to_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (vars(DType::F32, 7), vars(DType::F32, 7));
    let (mut first, mut solo) = (adamw(&one, &Options::default()), Solo::new());
    first.save_checkpoint(folder.path(), 3).unwrap();
    let mut second = adamw(&two, &Options::default()).on(&mut solo).unwrap();
    // Reading is anyone's.
    assert_eq!(second.resume(folder.path()).unwrap(), 3);
    let error = second.save_checkpoint(folder.path(), 4).unwrap_err().to_string();
    assert!(error.contains("another run has locked"), "{error}");
    drop(first);
    second.save_checkpoint(folder.path(), 4).unwrap();
    second.step(&gradients(&two, 0, 0..8)).unwrap();
}

#[test]
fn a_save_after_every_0_steps_is_refused_and_none_after_the_last_step_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("checkpoint");
    let vars = vars(DType::F32, 7);
    let mut fused = adamw(&vars, &options());
    let error = fused.checkpoint_every(0, &folder, 4).unwrap_err();
    assert!(error.to_string().contains("1 step or more"), "{error}");
    let mut solo = Solo::new();
    let mut ranked = adamw(&vars, &options()).on(&mut solo).unwrap();
    let error = ranked.checkpoint_every(0, &folder, 4).unwrap_err();
    assert!(error.to_string().contains("1 step or more"), "{error}");
    assert!(!folder.exists());
    drop(ranked);
    assert!(fused.checkpoint_every(1, &folder, usize::MAX).unwrap());
    fused.finish_saves().unwrap();
    assert_eq!(fused.resume(&folder).unwrap(), usize::MAX);
}

#[test]
fn a_variable_that_files_of_models_cannot_have_is_named_and_ranks_save_it_apart() {
    let first = |value: f32| {
        let var = Var::from_vec(vec![value; 3], 3, &Device::Cpu).unwrap();
        vec![("__metadata__".to_owned(), var)]
    };
    let folder = tempfile::tempdir().unwrap();
    let mut alone = adamw(&first(1.0), &Options::default());
    let error = alone.save_checkpoint(folder.path(), 1).unwrap_err().to_string();
    assert!(error.contains("variable `__metadata__`: expected another name"), "{error}");
    let mut solo = Solo::new();
    let mut saved = adamw(&first(1.0), &Options::default()).on(&mut solo).unwrap();
    saved.save_checkpoint(folder.path(), 1).unwrap();
    drop(saved);
    let (vars, mut solo) = (first(2.0), Solo::new());
    let mut resumed = adamw(&vars, &Options::default()).on(&mut solo).unwrap();
    assert_eq!(resumed.resume(folder.path()).unwrap(), 1);
    assert_eq!(vars[0].1.to_vec1::<f32>().unwrap(), [1.0; 3]);
}
