//! Sums over leaves, folded into those of chunks as the kernel folds that reads a chunk whole.

use fusestep_amp::norm_kernel;
use fusestep_launch::{
    Access, Backend, Batchable, CHUNK_ELEMENTS, CHUNK_LEAVES, FoldLeaves, LEAF_ELEMENTS,
    LaunchLimits, LeafSquares, ListBuffer, Reduce, SquareSum, TensorList, TensorPartials, batches,
};
use fusestep_tensor::{DType, Role};

use crate::common::{cpu, cuda};

/// More than half of a chunk's leaves, a few with a short last one, and less than a leaf.
const NUMELS: [u64; 3] = [40_000, 8_705, 37];

/// The gradients, one of them infinite.
fn gradients() -> Vec<u8> {
    let all = NUMELS.iter().sum::<u64>();
    let value = |at: u64| match at {
        33_000 => f32::INFINITY,
        _ => (at * 37 % 1_009) as f32 * 0.003 - 1.5,
    };
    (0..all).map(value).flat_map(f32::to_le_bytes).collect()
}

/// The gradients in memory of a backend.
fn list_of(backend: &dyn Backend) -> ListBuffer {
    let bytes = gradients();
    let mut buffer = backend.allocate(bytes.len()).unwrap();
    backend.write(buffer.as_mut(), 0, &bytes).unwrap();
    ListBuffer {
        list: TensorList { role: Role::Grad, dtype: DType::F32, access: Access::Read },
        buffer,
    }
}

/// The sums of chunks on a backend: read whole, and folded from leaves on a device.
fn sums(backend: &dyn Backend, folds: bool) -> Vec<SquareSum> {
    let kernel = norm_kernel(DType::F32).unwrap();
    let tensors = (0..).zip(NUMELS).map(|(tensor, numel)| Batchable {
        tensor,
        first_element: 0,
        numel,
        group: 0,
    });
    let limits = LaunchLimits { chunk_elements: CHUNK_ELEMENTS, ..backend.limits() };
    let batches = batches(kernel.entry(), tensors, kernel.argument_layout(), limits).unwrap();
    let offsets = [0, NUMELS[0], NUMELS[0] + NUMELS[1]];
    let list = list_of(backend);
    let width = size_of::<SquareSum>();
    let mut partials = backend.allocate(NUMELS.len() * width).unwrap();
    if folds {
        let (mut next, mut places) = (0, Vec::new());
        for numel in NUMELS {
            let count = numel.div_ceil(LEAF_ELEMENTS);
            assert!(count <= CHUNK_LEAVES as u64);
            places.push(TensorPartials { first: next, count });
            next += count;
        }
        let mut leaves = backend.allocate(next as usize * width).unwrap();
        let squares = LeafSquares {
            kernel: kernel.as_ref(),
            batches: &batches,
            offsets: &offsets,
            list: &list,
            first: 0,
        };
        let device = backend.device().unwrap();
        device.leaf_squares_into(squares, leaves.as_mut(), 0).unwrap();
        let refused = device.leaf_squares_into(squares, leaves.as_mut(), 1);
        assert!(refused.is_err(), "beyond its end");
        let table: &[u8] = bytemuck::cast_slice(&places);
        let mut places = backend.allocate(table.len()).unwrap();
        backend.write(places.as_mut(), 0, table).unwrap();
        device
            .fold_leaves(FoldLeaves {
                leaves: leaves.as_ref(),
                index: None,
                places: places.as_ref(),
                partials: partials.as_mut(),
            })
            .unwrap();
    } else {
        backend
            .reduce(Reduce {
                kernel: kernel.as_ref(),
                batches: &batches,
                offsets: &offsets,
                members: &[0, 1, 2],
                list: Some(&list),
                partials: partials.as_mut(),
                first_partial: 0,
            })
            .unwrap();
    }
    let mut found = vec![SquareSum::default(); NUMELS.len()];
    let out = bytemuck::cast_slice_mut(&mut found);
    backend.read(partials.as_ref(), 0, out).unwrap();
    found
}

#[test]
fn chunks_folded_from_leaves_have_the_sums_of_chunks_read_whole() {
    let backend = cuda();
    let expected = sums(&cpu(), false);
    assert_eq!(expected.iter().map(|sum| sum.non_finite).sum::<u64>(), 1);
    assert_eq!(sums(&backend, false), expected);
    assert_eq!(sums(&backend, true), expected);
}

#[test]
fn leaves_read_by_the_host_are_those_of_the_host() {
    let (kernel, backend) = (norm_kernel(DType::F32).unwrap(), cuda());
    let found = |backend: &dyn Backend| {
        let list = list_of(backend);
        // A part that begins behind the tensor's first leaf, in a list that begins there too.
        let part = Batchable {
            tensor: 0,
            first_element: 2 * LEAF_ELEMENTS,
            numel: 3 * LEAF_ELEMENTS + 5,
            group: 0,
        };
        let limits = LaunchLimits { chunk_elements: CHUNK_ELEMENTS, ..backend.limits() };
        let layout = kernel.argument_layout();
        let batches = batches(kernel.entry(), [part], layout, limits).unwrap();
        let leaves = LeafSquares {
            kernel: kernel.as_ref(),
            batches: &batches,
            offsets: &[0],
            list: &list,
            first: LEAF_ELEMENTS,
        };
        let mut sums = [SquareSum::default(); 4];
        backend.leaf_squares(leaves, &mut sums).unwrap();
        assert!(backend.leaf_squares(leaves, &mut sums[..3]).is_err());
        sums
    };
    assert_eq!(found(&backend), found(&cpu()));
}
