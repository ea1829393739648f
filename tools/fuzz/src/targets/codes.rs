//! Changes to state in codes, as a state file and as a checkpoint whose checksums are set right:
//! any codes, any units, lists of other lengths and types, and any counts of what is not finite.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::OnceLock;

use fusestep_checkpoint::{
    CheckpointFolder, KeptState, Manifest, StateTensors, convert, load, load_state, save,
};
use fusestep_collective::Solo;
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_fused_sgd::Sgd;
use fusestep_launch::{Master, Precision, StateDType};
use fusestep_planner::{
    Comms, Optimizer, Plan, Planner, RunAlone, RunToLoad, RunToSave, State, Topology,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use fusestep_tensor_file::{Files, TensorBytes, TensorFile, serialize};
use fusestep_testkit::SimulatedDisk;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::Outcome;
use crate::mutate::Numbers;

/// Most changes of an input.
const MOST_CHANGES: usize = 32;

/// The folders of a checkpoint and of a converted one.
const FROM: &str = "/c";
const TO: &str = "/to";

/// Units at which arithmetic breaks.
const UNITS: [f32; 10] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    -1.0,
    -0.0,
    0.0,
    f32::MIN_POSITIVE,
    1e-45,
    f32::MAX,
    -f32::MAX,
];

/// Tensors of a file and its texts.
type Content = (Vec<(String, TensorBytes<'static>)>, HashMap<String, String>);

/// A run with state in codes, a step in: what it saves is changed.
struct Base {
    plan: Plan,
    file: Content,
    manifest: Manifest,
    /// Files of the checkpoint, in the manifest's order.
    shards: Vec<Vec<u8>>,
}

pub(crate) fn run(input: &[u8]) -> Outcome {
    static BASES: OnceLock<Vec<Base>> = OnceLock::new();
    let bases = BASES.get_or_init(|| (0..6).map(|which| base(which).expect("a run")).collect());
    let (first, changes) = input.split_first().unwrap_or((&0, &[]));
    let base = &bases[usize::from(*first) % bases.len()];
    let one = of_state_file(base, changes).map_err(|error| format!("{error:#}"))??;
    let other = of_checkpoint(base, changes).map_err(|error| format!("{error:#}"))??;
    Ok(format!("{one}\n{other}"))
}

/// Adam with and without the largest moment, and momentum; f32, and bf16 with 8 bits beside it.
fn base(which: usize) -> anyhow::Result<Base> {
    let rule: Optimizer = match which % 3 {
        0 => Adam::default().into(),
        1 => Adam { second_moment: SecondMoment::Largest, ..Adam::default() }.into(),
        _ => Sgd { momentum: 0.5, ..Sgd::default() }.into(),
    };
    let (dtype, master) = match which / 3 {
        0 => (DType::F32, Master::None),
        _ => (DType::BF16, Master::Remainder8),
    };
    let desc = |name, numel| anyhow::Ok(ParamDesc::new(name, Shape::new([numel])?, dtype));
    let params = [desc("a", 4_129)?, desc("b", 3)?];
    let precision = Precision { master, state: StateDType::Int8, ..Precision::default() };
    let plan = Planner::new(rule).precision(precision).plan_for(&params, Topology::SOLO)?;
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend)?;
    for param in &params {
        // Any bits of small numbers, in each type.
        let bytes = (0..param.numel() * dtype.len_bytes() as u64).map(|at| 0x3c - (at % 5) as u8);
        state.write(&backend, Role::Grad, &param.name, &bytes.collect::<Vec<_>>())?;
    }
    RunAlone::of(&plan, &mut state, &backend).step_all()?;
    let file = StateTensors::of(&state, &backend)?;
    let disk = SimulatedDisk::new(0, []);
    let folder = CheckpointFolder::of(&disk, Path::new(FROM));
    let (mut comm, run) = (Solo::new(), RunToSave::of(&plan, &state, &backend));
    save(run, &mut Comms::direct(&mut comm), folder, BTreeMap::new())?;
    let manifest = Manifest::read(folder)?;
    let generation = Path::new(FROM).join(&manifest.generation);
    let shards = manifest.shards.iter().map(|shard| Ok(disk.read(&generation.join(&shard.file))?));
    let shards = shards.collect::<anyhow::Result<_>>()?;
    drop(state);
    Ok(Base { plan, file: (file.tensors, file.metadata), manifest, shards })
}

/// Changes lists of state as the bytes say, and sets their checksums right.
fn change((tensors, metadata): &mut Content, bytes: &[u8]) {
    let mut numbers = Numbers(bytes);
    for _ in 0..MOST_CHANGES {
        if numbers.is_empty() || tensors.is_empty() {
            break;
        }
        let at = numbers.below(tensors.len() as u64) as usize;
        let (name, tensor) = &mut tensors[at];
        let numel = tensor.shape.iter().product::<usize>();
        let list = tensor.bytes.to_mut();
        let count = list.len() as u64;
        let noted = format!("non_finite@{name}");
        match numbers.byte() % 8 {
            0 => put(list, numbers.below(count), &[numbers.byte()]),
            1 => list.fill(numbers.byte()),
            2 | 3 => {
                let unit = UNITS[usize::from(numbers.byte()) % UNITS.len()];
                put(list, numbers.below(count) / 4 * 4, &unit.to_le_bytes());
            }
            4 => {
                let width = (list.len() / numel.max(1)).max(1);
                let numel = numbers.below(2 * numel as u64) as usize;
                list.resize(numel * width, numbers.byte());
                tensor.shape = vec![numel];
            }
            5 => {
                metadata.insert(noted, numbers.wide().to_string());
            }
            6 => {
                let values = list.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                let count = values.filter(|value| !value.is_finite()).count();
                metadata.insert(noted, count.to_string());
            }
            _ => {
                let all = std::mem::take(list);
                if let Ok(shape) = Shape::new([count]) {
                    *tensor = TensorBytes::of(DType::U8, &shape, Cow::Owned(all));
                }
            }
        }
    }
    for (name, tensor) in tensors {
        metadata.insert(format!("xxh3@{name}"), sum(&tensor.bytes));
    }
}

fn put(list: &mut [u8], at: u64, bytes: &[u8]) {
    for (place, byte) in list.iter_mut().skip(at as usize).zip(bytes) {
        *place = *byte;
    }
}

fn sum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

/// The changed state as a state file.
fn of_state_file(base: &Base, changes: &[u8]) -> anyhow::Result<Outcome> {
    let mut content = base.file.clone();
    change(&mut content, changes);
    let (tensors, mut metadata) = content;
    metadata.remove("xxh3");
    let mut hasher = Xxh3::new();
    for (key, value) in metadata.iter().collect::<BTreeMap<_, _>>() {
        for text in [key, value] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
    metadata.insert("xxh3".to_owned(), format!("{:016x}", hasher.digest()));
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    fs::write(&path, serialize(&path, &tensors, metadata)?)?;
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = base.plan.allocate(&backend)?;
    let before = saved(&state, &backend)?;
    match load_state(&mut state, &backend, &path) {
        Err(error) => {
            let text = error.to_string().replace(&path.display().to_string(), "");
            Ok(refused(text, saved(&state, &backend)? == before))
        }
        Ok(_) => taken(base, &mut state, &backend),
    }
}

/// The changed state as a checkpoint: loaded, looked at and converted.
fn of_checkpoint(base: &Base, changes: &[u8]) -> anyhow::Result<Outcome> {
    let disk = SimulatedDisk::new(0, []);
    let mut manifest = base.manifest.clone();
    let generation = Path::new(FROM).join(&manifest.generation);
    disk.create_folder(&generation)?;
    for (spec, bytes) in manifest.shards.iter_mut().zip(&base.shards) {
        let path = generation.join(&spec.file);
        let mut bytes = Cow::Borrowed(bytes);
        if spec.file.starts_with("shard-") {
            let file = TensorFile::parse(&path, bytes.to_vec())?;
            let mut content = content_of(&file);
            change(&mut content, changes);
            bytes = Cow::Owned(serialize(&path, &content.0, content.1)?);
        }
        (spec.len_bytes, spec.xxh3) = (bytes.len() as u64, sum(&bytes));
        disk.write_new(&path, &bytes)?;
    }
    manifest.xxh3 = String::new();
    manifest.xxh3 = sum(&serde_json::to_vec(&manifest)?);
    disk.write_new(&Path::new(FROM).join("manifest.json"), &serde_json::to_vec(&manifest)?)?;
    let from = CheckpointFolder::of(&disk, Path::new(FROM));
    let looked = Manifest::verify(from);
    let kept = KeptState { dtype: StateDType::Compute, keep_f32: &[] };
    let converted = convert(from, CheckpointFolder::of(&disk, Path::new(TO)), kept);
    if let (Err(error), Ok(_)) = (&looked, &converted) {
        return Ok(Err(format!("converted what is refused: {error}")));
    }
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = base.plan.allocate(&backend)?;
    let before = saved(&state, &backend)?;
    match load(RunToLoad::of(&base.plan, &mut state, &backend), from) {
        Err(error) => Ok(refused(error.to_string(), saved(&state, &backend)? == before)),
        Ok(_) => match looked {
            Ok(_) => taken(base, &mut state, &backend),
            Err(error) => Ok(Err(format!("loaded what is refused: {error}"))),
        },
    }
}

/// The tensors and texts of a file, to be changed.
fn content_of(file: &TensorFile) -> Content {
    let tensor = |(name, entry): (&String, &fusestep_tensor_file::TensorEntry)| {
        let own = entry.with_bytes(file.bytes(name).unwrap_or_default());
        let bytes = Cow::Owned(own.bytes.into_owned());
        (name.clone(), TensorBytes { dtype: own.dtype, shape: own.shape, bytes })
    };
    (file.entries().iter().map(tensor).collect(), file.metadata().clone())
}

fn saved(state: &State, backend: &CpuBackend) -> anyhow::Result<Vec<u8>> {
    let saved = StateTensors::of(state, backend)?;
    Ok(serialize(Path::new("state"), &saved.tensors, saved.metadata)?)
}

/// What is refused is named, and has changed nothing.
fn refused(text: String, is_unchanged: bool) -> Outcome {
    if !is_unchanged {
        return Err(format!("refused, and changed all the same: {text}"));
    }
    // Of all lists together where a file is too short for them.
    if !["a@", "b@", "`tensors`"].iter().any(|name| text.contains(name)) {
        return Err(format!("refused without the name of a list: {text}"));
    }
    Ok(text)
}

/// What is accepted has units that a run can have, and goes on.
fn taken(base: &Base, state: &mut State, backend: &CpuBackend) -> anyhow::Result<Outcome> {
    let all = StateTensors::of(state, backend)?;
    for (name, tensor) in all.tensors.iter().filter(|(name, _)| name.ends_with("_units")) {
        let units = tensor.bytes.as_chunks::<4>().0.iter().map(|unit| f32::from_le_bytes(*unit));
        let is_noted = all.metadata.contains_key(&format!("non_finite@{name}"));
        for unit in units {
            if unit < 0.0 || !(unit.is_finite() || is_noted) {
                return Ok(Err(format!("{name}: loaded a unit of {unit}")));
            }
        }
    }
    RunAlone::of(&base.plan, state, backend).step_all()?;
    Ok(Ok("loaded".to_owned()))
}
