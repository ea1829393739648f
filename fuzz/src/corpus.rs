//! The inputs that fuzzing begins with, written anew by `corpus`: one or two good ones for every
//! format.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::Result;
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{Comms, Manifest, Planner, Shard, StateTensors, Topology, ZeroStage};
use fusestep_tensor::Role;
use fusestep_tensor_file::serialize;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::targets::state::params;

/// Writes corpora and the files beside the manifest.
pub(crate) fn write(root: &Path) -> Result<()> {
    let put = |target: &str, name: &str, bytes: &[u8]| -> Result<()> {
        let folder = root.join("corpus").join(target);
        fs::create_dir_all(&folder)?;
        Ok(fs::write(folder.join(name), bytes)?)
    };
    let mut state = state()?;
    let path = Path::new("state");
    let adam = serialize(path, &state.tensors, state.metadata.clone())?;
    put("state", "adam", &adam)?;
    put("tensor_file", "state", &adam)?;
    // One of version 1 has no checksums, so that changes get past them.
    state.metadata.retain(|key, _| key == "step");
    put(
        "state",
        "old",
        &serialize(path, &state.tensors, state.metadata)?,
    )?;
    put("tensor_file", "empty", b"\x02\0\0\0\0\0\0\0{}")?;
    let shapes: [&[u8]; 2] = [
        br#"[{"name":"a","shape":[10,64]},{"name":"b","shape":[],"dtype":"bf16"},{"name":"c","shape":[0,7]}]"#,
        b"[]",
    ];
    for (at, text) in shapes.iter().enumerate() {
        put("shapes", &format!("{at}.json"), text)?;
    }
    let folder = tempfile::tempdir()?;
    checkpoint(folder.path())?;
    let text = fs::read_to_string(folder.path().join("manifest.json"))?;
    put("manifest", "new.json", text.as_bytes())?;
    let manifest = Manifest::read(folder.path())?;
    // Older ones have no checksum, so that changes get past it.
    let old = text.replace("\"version\": 3", "\"version\": 1");
    let old = old.replace(&manifest.xxh3, "");
    put("manifest", "old.json", old.as_bytes())?;
    fs::create_dir_all(root.join("shards"))?;
    for shard in &manifest.shards {
        let from = folder.path().join(&manifest.generation).join(&shard.file);
        fs::copy(from, root.join("shards").join(&shard.file))?;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for target in ["plan", "packing"] {
        for (at, length) in [40, 200, 1_000].into_iter().enumerate() {
            let bytes: Vec<u8> = (0..length).map(|_| rng.random()).collect();
            put(target, &at.to_string(), &bytes)?;
        }
    }
    Ok(())
}

/// The state of the model of target `state` after a step.
fn state() -> Result<StateTensors> {
    let plan = Planner::new(Adam::default().into()).plan(&params()?)?;
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend)?;
    for desc in plan.params() {
        let bytes: Vec<u8> = (0..desc.numel())
            .flat_map(|at| (at as f32 - 1.5).to_le_bytes())
            .collect();
        state.write(&backend, Role::Grad, &desc.name, &bytes)?;
    }
    plan.run(&mut state, &backend)?;
    Ok(state.to_tensors(&backend)?)
}

/// A checkpoint of two files.
fn checkpoint(folder: &Path) -> Result<()> {
    let mut comm = fusestep_collective::Solo::new();
    let topology = Topology::new(0, 1)?;
    let planner = Planner::new(Adam::default().into()).with(Shard::new(ZeroStage::One));
    let plan = planner.plan_for(&params()?, topology)?;
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let state = plan.allocate(&backend)?;
    let one = folder.join("one");
    let texts = BTreeMap::from([("at".to_owned(), "0".to_owned())]);
    plan.save(
        &state,
        &backend,
        &mut Comms::direct(&mut comm),
        one.as_path(),
        texts,
    )?;
    Manifest::read(&one)?.reshard(one.as_path(), folder, 2)?;
    Ok(())
}
