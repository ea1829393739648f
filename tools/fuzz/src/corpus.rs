//! The inputs that fuzzing begins with, written anew by `corpus`: one or two good ones for every
//! format.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::Result;
use fusestep_checkpoint::{Manifest, StateTensors, save};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{Comms, Planner, RunAlone, RunToSave, Shard, Topology, ZeroStage};
use fusestep_tensor::{DType, Role};
use fusestep_tensor_file::serialize;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::targets::journal::{examples, pointer};
use crate::targets::mark::list_of;
use crate::targets::state::{params, plan};

/// Writes corpora and the files beside the manifest.
pub(crate) fn write(root: &Path) -> Result<()> {
    let put = |target: &str, name: &str, bytes: &[u8]| -> Result<()> {
        let folder = root.join("corpus").join(target);
        fs::create_dir_all(&folder)?;
        Ok(fs::write(folder.join(name), bytes)?)
    };
    let path = Path::new("state");
    for (first, name) in [(5, "momentum_bf16"), (10, "lamb_f16"), (3, "lars")] {
        let state = state(first)?;
        let file = serialize(path, &state.tensors, state.metadata)?;
        put("state", name, &[&[first], &file[..]].concat())?;
    }
    let mut state = state(0)?;
    let adam = serialize(path, &state.tensors, state.metadata.clone())?;
    put("state", "adam", &[&[0], &adam[..]].concat())?;
    put("tensor_file", "state", &adam)?;
    // One of version 1 has no checksums, so that changes get past them.
    state.metadata.retain(|key, _| matches!(key.as_str(), "optimizer" | "step"));
    let old = serialize(path, &state.tensors, state.metadata)?;
    put("state", "old", &[&[0], &old[..]].concat())?;
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
    let old = text.replace("\"version\": 5", "\"version\": 1");
    let old = old.replace(&manifest.xxh3, "");
    put("manifest", "old.json", old.as_bytes())?;
    fs::create_dir_all(root.join("shards"))?;
    for shard in &manifest.shards {
        let from = folder.path().join(&manifest.generation).join(&shard.file);
        let bytes = fs::read(from)?;
        fs::write(root.join("shards").join(&shard.file), &bytes)?;
        put("shards", &shard.file, &bytes)?;
    }
    let mark = folder.path().join(&manifest.generation).join("mark.json");
    put("mark", "own", &fs::read(mark)?)?;
    put("mark", "list", &list_of(&manifest))?;
    for (name, journal) in ["two", "folders"].iter().zip(examples()) {
        put("journal", name, &serde_json::to_vec(&journal)?)?;
    }
    put("journal", "pointer", pointer().as_bytes())?;
    // A path to a folder may have any number of these, and no message repeats them.
    let slashes = "/".repeat(5_000);
    put("journal", "slashes", pointer().replace("/.fusestep-p.journal", &slashes).as_bytes())?;
    for (name, input) in changes_of_codes() {
        put("codes", name, &input)?;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for target in ["plan", "packing", "codes"] {
        for (at, length) in [40, 200, 1_000].into_iter().enumerate() {
            let bytes: Vec<u8> = (0..length).map(|_| rng.random()).collect();
            put(target, &at.to_string(), &bytes)?;
        }
    }
    Ok(())
}

/// Inputs of target `codes`: the run by the first byte, and changes: each a list, what is done to
/// it, where, and to what.
fn changes_of_codes() -> [(&'static str, Vec<u8>); 5] {
    let [first, second, third] = [0, 1, 3].map(|list| [8, list, 0, 0, 0, 0, 0, 0, 0]);
    [
        ("unchanged", vec![0]),
        ("unchanged_bf16", vec![3]),
        ("code", [&[1][..], &first, &[0], &first, &[200]].concat()),
        ("no_root", [&[0][..], &second, &[1, 0]].concat()),
        ("negative_unit", [&[0][..], &third, &[2, 3], &first].concat()),
    ]
}

/// The state of a model of target `state` after a step.
fn state(first: u8) -> Result<StateTensors> {
    let plan = plan(first)?;
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend)?;
    for desc in plan.params() {
        // Any bits of small numbers, in each type.
        let bytes = vec![0x3c; desc.numel() as usize * desc.dtype.len_bytes()];
        state.write(&backend, Role::Grad, &desc.name, &bytes)?;
    }
    RunAlone::of(&plan, &mut state, &backend).step_all()?;
    Ok(StateTensors::of(&state, &backend)?)
}

/// A checkpoint of two files.
fn checkpoint(folder: &Path) -> Result<()> {
    let mut comm = fusestep_collective::Solo::new();
    let topology = Topology::new(0, 1)?;
    let planner = Planner::new(Adam::default().into()).with(Shard::new(ZeroStage::One));
    let plan = planner.plan_for(&params(DType::F32)?, topology)?;
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let state = plan.allocate(&backend)?;
    let one = folder.join("one");
    let texts = BTreeMap::from([("at".to_owned(), "0".to_owned())]);
    save(
        RunToSave::of(&plan, &state, &backend),
        &mut Comms::direct(&mut comm),
        one.as_path(),
        texts,
    )?;
    Manifest::read(&one)?.reshard(one.as_path(), folder, 2)?;
    Ok(())
}
