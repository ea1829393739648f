//! What ranks tell each other through the control communicator before data moves.

use fusestep_collective::Fingerprint;

/// Bytes of a frame: the reason in a word of its own, then the fingerprint.
pub(crate) const FRAME_BYTES: usize = REASON_BYTES + Fingerprint::WIRE_BYTES;

const REASON_BYTES: usize = 8;

/// Why a rank speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// It is about to make this call.
    Call(Fingerprint),
    /// The data of its last call has not come through.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code))]
    Stuck(Fingerprint),
}

impl Frame {
    pub(crate) fn fingerprint(&self) -> &Fingerprint {
        match self {
            Frame::Call(print) | Frame::Stuck(print) => print,
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[0] = u8::from(matches!(self, Frame::Stuck(_)));
        bytes[REASON_BYTES..].copy_from_slice(&self.fingerprint().to_bytes());
        bytes
    }

    /// `None` for bytes that no rank of this version has written.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (reason, print) = bytes.split_at_checked(REASON_BYTES)?;
        let print = Fingerprint::from_bytes(print)?;
        match reason[0] {
            0 => Some(Frame::Call(print)),
            1 => Some(Frame::Stuck(print)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use fusestep_collective::{CallContext, Operation};
    use fusestep_tensor::DType;

    use super::*;

    #[test]
    fn frames_come_back_as_they_went() {
        let print = Fingerprint {
            sequence: 7,
            operation: Operation::Broadcast { root: 3 },
            dtype: DType::BF16,
            numel: 1 << 40,
            counts_hash: 5,
            context: CallContext { plan_hash: u64::MAX, bucket: Some(4) },
        };
        for frame in [Frame::Call(print), Frame::Stuck(print)] {
            assert_eq!(Frame::from_bytes(&frame.to_bytes()), Some(frame));
        }
        assert_eq!(Frame::from_bytes(&[0; 3]), None);
        assert_eq!(Frame::from_bytes(&[99; FRAME_BYTES]), None);
    }
}
