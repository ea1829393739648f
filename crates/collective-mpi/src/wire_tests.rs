use fusestep_collective::{CallContext, Operation};
use fusestep_tensor::DType;

use super::*;

#[test]
fn headers_come_back_as_they_were() {
    for membership in [None, Some((0, 0)), Some((u32::MAX, 3))] {
        let header = Header {
            fingerprint: Fingerprint {
                sequence: u64::MAX - 1,
                operation: Operation::Gather { root: 5 },
                dtype: DType::U16,
                numel: 1 << 40,
                counts_hash: 3,
                context: CallContext { plan_hash: 9, bucket: Some(7) },
            },
            membership: membership.map(|(colour, key)| Membership { colour, key }),
            proposal: 77,
        };
        assert_eq!(Header::from_bytes(&header.to_bytes()), Some(header));
    }
    assert_eq!(Header::from_bytes(&[0; 8]), None);
    assert_eq!(Header::from_bytes(&[0xff; HEADER_BYTES]), None);
}

#[test]
fn notices_come_back_as_they_were() {
    let notice =
        Notice { origin: 3, entered: 8, error: CollectiveError::Left { rank: 1, calls: 0 } };
    assert_eq!(Notice::from_bytes(&notice.to_bytes()), Some(notice));
    assert_eq!(Notice::from_bytes(b"[]"), None);
}
