//! Argument bytes, places and what a backend does by default, by a kernel and a backend that do
//! nothing else.

use std::any::Any;

use fusestep_launch::{
    Access, Addresses, ArgumentLayout, Backend, BackendError, Batch, Buffer, ChangedRecord,
    Conclude, ControlBlock, Excluded, FLAG_STOCHASTIC, Gate, GroupValues, HostRun, Launch,
    LaunchLimits, LaunchReport, Launches, LeafSquares, ListBuffer, MAX_SUMS, Memory,
    MultiTensorKernel, MultiTensorReduction, Record, Reduce, SquareSum, TensorList, UpdateSums,
    pack, pack_conclusion, pack_reduction, pack_reduction_of_tensors, pack_reduction_table,
    pack_table, pack_tensors, pack_update_sums,
};
use fusestep_simd::Level;
use fusestep_tensor::{DType, Role};

#[derive(Debug)]
struct Bytes(Vec<u8>);

impl Buffer for Bytes {
    fn len_bytes(&self) -> usize {
        self.0.len()
    }
    fn host(&self) -> Option<&[u8]> {
        Some(&self.0)
    }
    fn host_mut(&mut self) -> Option<&mut [u8]> {
        Some(&mut self.0)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Memory and launches alone: whatever has a default here has it.
struct Plain;

impl Backend for Plain {}

impl Memory for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }
    fn limits(&self) -> LaunchLimits {
        LaunchLimits::default()
    }
    fn allocate(&self, len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError> {
        Ok(Box::new(Bytes(vec![0; len_bytes])))
    }
    fn write(&self, out: &mut dyn Buffer, at: usize, bytes: &[u8]) -> Result<(), BackendError> {
        out.host_mut().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
    fn read(&self, from: &dyn Buffer, at: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        bytes.copy_from_slice(&from.host().unwrap()[at..at + bytes.len()]);
        Ok(())
    }
    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }
}

impl Launches for Plain {
    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        Ok(LaunchReport::of(launch.batches))
    }
    fn reduce(&self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        Ok(LaunchReport::of(reduce.batches))
    }
    fn conclude(&self, _: Conclude<'_>) -> Result<LaunchReport, BackendError> {
        Ok(LaunchReport::default())
    }
    fn leaf_sums(&self, _: &Launch<'_>, _: &mut [[f64; MAX_SUMS]]) -> Result<(), BackendError> {
        Ok(())
    }
    fn take_skipped(&self) -> Result<u64, BackendError> {
        Ok(0)
    }
    fn skipped(&self) -> u64 {
        0
    }
}

const PARAM: TensorList =
    TensorList { role: Role::Param, dtype: DType::F32, access: Access::ReadWrite };
const GRAD: TensorList = TensorList { role: Role::Grad, dtype: DType::BF16, access: Access::Read };

/// A kernel of a parameter in 32 bits and a gradient in 16.
struct Kernel {
    flags: u32,
    words: usize,
}

impl MultiTensorKernel for Kernel {
    fn stem(&self) -> &'static str {
        "test"
    }
    fn entry(&self) -> &'static str {
        "test_f32"
    }
    fn lists(&self) -> &[TensorList] {
        const { &[PARAM, GRAD] }
    }
    fn argument_layout(&self) -> ArgumentLayout {
        ArgumentLayout { lists: self.words, scalar_bytes: 8, step_scalar_bytes: 8 }
    }
    fn flags(&self) -> u32 {
        self.flags
    }
    fn write_scalars(&self, _: &mut [u8]) {}
    fn write_step_scalars(&self, _: GroupValues, _: &mut [u8]) {}
    fn run_host(&self, _: HostRun<'_, '_>) {}
}

/// Counts bytes in place of squares.
struct Lengths;

impl MultiTensorReduction for Lengths {
    fn stem(&self) -> &'static str {
        "test"
    }
    fn entry(&self) -> &'static str {
        "test_norm_f32"
    }
    fn list(&self) -> TensorList {
        GRAD
    }
    fn chunk_elements(&self) -> u32 {
        4096
    }
    fn run_host(&self, _: Level, chunk: &[u8]) -> SquareSum {
        SquareSum {
            sum: chunk.iter().map(|&byte| f64::from(byte)).sum(),
            non_finite: chunk.len() as u64,
        }
    }
}

/// Tensor 2 whole and a part of tensor 1, of other hyper-parameters.
fn batch() -> Batch {
    let record = |tensor, first_element, numel, first_chunk, group| Record {
        tensor,
        first_element,
        numel,
        first_chunk,
        group,
    };
    Batch {
        records: vec![record(1, 1024, 1500, 0, 0), record(2, 0, 7, 2, 1)],
        groups: vec![1, 0],
        chunks: 3,
    }
}

const OFFSETS: [u64; 4] = [0, 64, 4096, 8192];
const MEMBERS: [u32; 3] = [5, 9, 4];

fn lists() -> Vec<ListBuffer> {
    let list = |list| ListBuffer { list, buffer: Box::new(Bytes(Vec::new())) };
    [PARAM, GRAD].map(list).into()
}

fn launch<'a>(
    kernel: &'a Kernel,
    batches: &'a [Batch],
    lists: &'a mut [ListBuffer],
    update_sums: Option<UpdateSums<'a>>,
) -> Launch<'a> {
    Launch {
        kernel,
        batches,
        offsets: &OFFSETS,
        members: &MEMBERS,
        lists,
        firsts: &[0, 64],
        scalars: &[1, 2, 3, 4, 5, 6, 7, 8],
        control: None,
        grad_sums: None,
        tensor_sums: None,
        update_sums,
        step_scalars: &[10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23, 24, 25, 26, 27],
        limits: LaunchLimits { chunk_elements: 1024, ..LaunchLimits::default() },
    }
}

fn reduction<'a>(batches: &'a [Batch], partials: &'a mut Bytes) -> Reduce<'a> {
    Reduce {
        kernel: &Lengths,
        batches,
        offsets: &OFFSETS,
        members: &MEMBERS,
        list: None,
        partials,
        first_partial: 0,
    }
}

/// Little-endian fields of several widths, one behind the other.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }
    fn place(self, numel: u64, first_chunk: u32, group: u16) -> Self {
        self.u64(numel).u32(first_chunk).u16(group).u16(0)
    }
}

#[test]
fn arguments_are_header_scalars_step_scalars_and_records() {
    let head = |flags| {
        let counts = Fields::default().u32(2).u32(2).u32(1024).u32(flags);
        let scalars = counts.u64(0x77).bytes(&[1, 2, 3, 4, 5, 6, 7, 8]);
        // Group 1 comes first in the batch.
        let step_scalars = scalars.bytes(&[20, 21, 22, 23, 24, 25, 26, 27]);
        step_scalars.bytes(&[10, 11, 12, 13, 14, 15, 16, 17])
    };
    // Element 64 + 1024 of the storage: 4 bytes each from 0x1000 on, and 2 each from 0x9000 on,
    // where element 64 lies.
    let first = |fields: Fields| fields.u64(0x1000 + 4 * 1088).u64(0x9000 + 2 * 1024);
    let second = |fields: Fields| fields.u64(0x1000 + 4 * 4096).u64(0x9000 + 2 * 4032);
    let plain = second(first(head(3)).place(1500, 0, 0)).place(7, 2, 1);
    let random = first(head(FLAG_STOCHASTIC)).u64(9).u64(1024);
    let random = second(random.place(1500, 0, 0)).u64(4).u64(0).place(7, 2, 1);
    for (flags, words, expected) in [(3, 2, plain), (FLAG_STOCHASTIC, 4, random)] {
        let (kernel, batches) = (Kernel { flags, words }, [batch()]);
        let mut lists = lists();
        let launch = launch(&kernel, &batches, &mut lists, None);
        let addresses = Addresses { lists: &[0x1000, 0x9000], control: 0x77 };
        let mut out = vec![0xee; expected.0.len() + 3];
        let len = pack(&launch, &batches[0], addresses, &mut out);
        assert_eq!(out[..len], expected.0);
        assert_eq!(out[len..], [0xee; 3]);
    }
}

/// Tensors at addresses of their own have the arguments of common lists, if they lie as in these.
#[test]
fn tensors_that_lie_anywhere_have_addresses_of_their_own() {
    let places = OFFSETS.map(|first| (4 * first, first.wrapping_sub(64).wrapping_mul(2)));
    let alike = places.map(|(param, grad)| [0x1000 + param, grad.wrapping_add(0x9000)]);
    for (flags, words) in [(3, 2), (FLAG_STOCHASTIC, 4)] {
        let (kernel, batches) = (Kernel { flags, words }, [batch()]);
        let mut own = lists();
        let launch = launch(&kernel, &batches, &mut own, None);
        let (mut expected, mut found) = (vec![0xee; 200], vec![0xee; 200]);
        let addresses = Addresses { lists: &[0x1000, 0x9000], control: 0x77 };
        let len = pack(&launch, &batches[0], addresses, &mut expected);
        let own = pack_tensors(&launch, &batches[0], alike.as_flattened(), 0x77, &mut found);
        assert_eq!(own, len);
        assert_eq!(found, expected);
    }
    let (mut expected, mut found) = ([0; 100], [0; 100]);
    let len = pack_reduction(&Lengths, &batch(), &OFFSETS, 0x9000, 0x66, &mut expected);
    let alike = OFFSETS.map(|first| 0x9000 + 2 * first);
    let own = pack_reduction_of_tensors(&Lengths, &batch(), &alike, 0x66, &mut found);
    assert_eq!((own, found), (len, expected));
}

#[test]
fn random_rounding_adds_two_words_to_a_record_of_any_length() {
    let kernel = Kernel { flags: FLAG_STOCHASTIC, words: 3 };
    let (batches, mut lists) = ([batch()], lists());
    let launch = launch(&kernel, &batches, &mut lists[..1], None);
    let addresses = Addresses { lists: &[0x1000], control: 0 };
    let mut out = [0; 1000];
    let len = pack(&launch, &batches[0], addresses, &mut out);
    assert_eq!(len, kernel.argument_layout().bytes(2, 2));
}

/// Header, the sums' address, and for each record its values' addresses, the copy's, the first sum
/// of the storage and the address of what says that it was skipped.
#[test]
fn tables_of_changes_are_header_sums_and_records() {
    let (kernel, batches) = (Kernel { flags: 3, words: 2 }, [batch()]);
    let (mut lists, mut rows) = (lists(), Bytes(Vec::new()));
    let update_sums = UpdateSums { rows: &mut rows, firsts: &[0, 1, 3, 4] };
    let launch = launch(&kernel, &batches, &mut lists, Some(update_sums));
    let changed = |kept, skipped| ChangedRecord { kept, skipped };
    let changed = [changed(0x100, 0x10), changed(0x200, 0)];
    let values = [(0, 0x1000), (1, 0x9000)];
    let found = pack_update_sums(&launch, &batches[0], &values, 0x77, 0x5000, &changed);
    let head = Fields::default().u32(2).u32(0).u32(1024).u32(0);
    let head = head.u64(0x77).u64(0x5000);
    let first = head.u64(0x1000 + 4 * 1088).u64(0x9000 + 2 * 1024);
    let first = first.u64(0x100).u64(1).u64(0x10).place(1500, 0, 0);
    let second = first.u64(0x1000 + 4 * 4096).u64(0x9000 + 2 * 4032);
    let second = second.u64(0x200).u64(3).u64(0).place(7, 2, 1);
    assert_eq!(found, second.u32(0).u32(0).u32(1).0);
}

/// A table is the arguments, and behind them the record of each chunk.
#[test]
fn tables_are_arguments_and_the_record_of_every_chunk() {
    let (kernel, batches) = (Kernel { flags: 0, words: 2 }, [batch()]);
    let mut own = lists();
    let launch = launch(&kernel, &batches, &mut own, None);
    let addresses = Addresses { lists: &[0x1000, 0x9000], control: 0 };
    let mut arguments = vec![0; 1000];
    let len = pack(&launch, &batches[0], addresses, &mut arguments);
    let chunks = Fields::default().u32(0).u32(0).u32(1);
    let expected = [&arguments[..len], &chunks.0].concat();
    assert_eq!(pack_table(&launch, &batches[0], addresses), expected);

    let mut partials = Bytes(Vec::new());
    let reduce = reduction(&batches, &mut partials);
    let len = pack_reduction(&Lengths, &batches[0], &OFFSETS, 1, 2, &mut arguments);
    let expected = [&arguments[..len], &Fields::default().u32(0).u32(1).0].concat();
    assert_eq!(pack_reduction_table(&reduce, &batches[0], 1, 2), expected);
}

#[test]
fn arguments_of_reductions_and_conclusions() {
    let head = Fields::default().u32(2).u32(0).u32(4096).u32(0).u64(0);
    let first = head.u64(0x66).u64(0x9000 + 2 * 1088).place(1500, 0, 0);
    let expected = first.u64(0x9000 + 2 * 4096).place(7, 2, 1);
    let mut out = vec![0; expected.0.len()];
    let len = pack_reduction(&Lengths, &batch(), &OFFSETS, 0x9000, 0x66, &mut out);
    assert_eq!((len, out), (expected.0.len(), expected.0));

    let head = Fields::default().u64(0).u64(0).u64(0x77);
    let expected = head.u64(1).u64(2).u64(3).u64(12).bytes(&[8; 8]);
    let mut out = vec![0; expected.0.len()];
    let len = pack_conclusion([1, 2, 3], 12, 0x77, &[8; 8], &mut out);
    assert_eq!((len, out), (expected.0.len(), expected.0));
}

fn gradients(bytes: Vec<u8>) -> ListBuffer {
    ListBuffer { list: GRAD, buffer: Box::new(Bytes(bytes)) }
}

#[test]
fn leaves_are_counted_from_the_start_of_each_record() {
    let bytes = (0..2 * 8192usize).map(|at| (at / 1000) as u8);
    let bytes: Vec<u8> = bytes.collect();
    let (batches, list) = ([batch()], gradients(bytes.clone()));
    let leaves = LeafSquares {
        kernel: &Lengths,
        batches: &batches,
        offsets: &OFFSETS,
        list: &list,
        first: 64,
    };
    let places: Vec<_> = leaves.places().collect();
    assert_eq!(places, [(1024, 1024), (2048, 476), (4032, 7)]);
    let mut sums = [SquareSum::default(); 3];
    Plain.leaf_squares(leaves, &mut sums).unwrap();
    for (sum, (first, numel)) in sums.iter().zip(places) {
        let leaf = &bytes[2 * first as usize..][..2 * numel as usize];
        let expected: f64 = leaf.iter().map(|&byte| f64::from(byte)).sum();
        assert_eq!((sum.sum, sum.non_finite), (expected, 2 * numel));
    }
    let error = Plain.leaf_squares(leaves, &mut sums[..2]).unwrap_err();
    let expected =
        BackendError::OutOfBounds { backend: "plain", offset_bytes: 0, len_bytes: 48, found: 32 };
    assert_eq!(error, expected);
}

#[test]
fn a_backend_has_the_roles_that_it_says_and_no_others() {
    assert!(Plain.host().is_none());
    assert!(Plain.device().is_none());
}

#[test]
fn a_control_block_opens_and_shuts_the_gate() {
    let mut buffer = Plain.allocate(64).unwrap();
    let mut block = ControlBlock { grad_factor: 0.25, skipped: 3, ..ControlBlock::default() };
    block.write(&Plain, buffer.as_mut()).unwrap();
    assert_eq!(ControlBlock::read(&Plain, buffer.as_ref()), Ok(block));
    assert_eq!(ControlBlock::on_host(buffer.as_ref()), Some(block));
    let open = Some(Gate::Open(0.25));
    assert_eq!(Gate::on_host(Some(buffer.as_ref())), open);
    block.found = 1;
    block.write(&Plain, buffer.as_mut()).unwrap();
    assert_eq!(Gate::on_host(Some(buffer.as_ref())), Some(Gate::Shut));
    assert_eq!(Gate::on_host(None), Some(Gate::Open(1.0)));
    let short = Bytes(vec![0; 63]);
    assert_eq!(Gate::on_host(Some(&short)), None);
}

#[test]
fn bytes_elements_and_launches_are_counted() {
    let kernel = Kernel { flags: 0, words: 2 };
    assert_eq!((PARAM.traffic_bytes(1), GRAD.traffic_bytes(1)), (8, 2));
    assert_eq!(kernel.traffic_bytes(3), 30);
    assert_eq!(batch().elements(), 1507);
    let report = LaunchReport::of(&[batch(), batch()]);
    assert_eq!((report.launches, report.elements), (2, 3014));
    let launch = launch(&kernel, &[], &mut [], None);
    assert_eq!((launch.first(0), launch.first(1), launch.first(2)), (0, 64, 0));
    // A kernel without norms is cut as the limits say.
    let limits = launch.limits;
    assert_eq!((limits.of(&kernel), limits.chunk_elements), (limits, 1024));
    let scalars = [Excluded::PlainLr, Excluded::TrustRatio].map(Excluded::plain_scalar);
    assert_eq!(scalars, [1.0, 0.0]);
}
