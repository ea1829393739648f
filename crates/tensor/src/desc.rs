//! Descriptors of parameters, from which the planner works.

use std::collections::HashMap;

use crate::{DType, MAX_MODEL_NUMEL, Shape, TensorError};

/// A parameter as the planner sees it: name, shape, dtype and its own hyper-parameters, no data.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ParamDesc {
    /// Unique name; also the key of its tensors in files.
    pub name: String,
    /// Extents.
    pub shape: Shape,
    /// Storage type of the parameter and its gradient.
    pub dtype: DType,
    /// Factor on the optimizer's learning rate for this parameter; 1 by default.
    pub lr_scale: f64,
    /// Weight decay of this parameter in place of the optimizer's; `None` keeps the optimizer's.
    pub weight_decay: Option<f64>,
    /// Whether a layer-wise rule scales this parameter's rate; `None` leaves the choice to the
    /// rule. Other rules ignore the field.
    #[cfg_attr(feature = "serde", serde(default))]
    pub trust: Option<Trust>,
}

/// Whether a layer-wise rule, LARS or LAMB, scales the learning rate of a parameter by its trust
/// ratio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Trust {
    /// The rate is multiplied with the trust ratio.
    Ratio,
    /// The rate is not scaled.
    Plain,
}

impl ParamDesc {
    /// Text of the range that a hyper-parameter must keep if it would be infinite in f32.
    pub const MOST_IN_F32: &str =
        "at most 3.4e38, since parameters other than f64 are updated in f32";

    /// A descriptor with the optimizer's own hyper-parameters.
    pub fn new(name: impl Into<String>, shape: Shape, dtype: DType) -> Self {
        Self { name: name.into(), shape, dtype, lr_scale: 1.0, weight_decay: None, trust: None }
    }

    /// The element count.
    pub fn numel(&self) -> u64 {
        self.shape.numel()
    }

    /// Checks the parameter's own hyper-parameters.
    ///
    /// # Errors
    /// [`TensorError::Hyper`] if `lr_scale` or `weight_decay` is negative or not finite, in f32
    /// where the parameter is not f64.
    pub fn validate(&self) -> Result<(), TensorError> {
        let checks = [("lr_scale", Some(self.lr_scale)), ("weight_decay", self.weight_decay)];
        for (what, value) in checks {
            let found = value.unwrap_or(0.0);
            let expected = match found {
                _ if !(found.is_finite() && found >= 0.0) => "a finite value of at least 0",
                _ if self.dtype != DType::F64 && (found as f32).is_infinite() => Self::MOST_IN_F32,
                _ => continue,
            };
            return Err(TensorError::Hyper { name: self.name.clone(), what, expected, found });
        }
        Ok(())
    }
}

/// Refuses a list in which two parameters carry one name.
///
/// # Errors
/// [`TensorError::DuplicateName`] with both positions.
pub fn check_unique_names(params: &[ParamDesc]) -> Result<(), TensorError> {
    let mut seen: HashMap<&str, usize> = HashMap::with_capacity(params.len());
    for (second, param) in params.iter().enumerate() {
        if let Some(first) = seen.insert(&param.name, second) {
            return Err(TensorError::DuplicateName { name: param.name.clone(), first, second });
        }
    }
    Ok(())
}

/// Refuses parameters that together have more than [`MAX_MODEL_NUMEL`] elements.
///
/// # Errors
/// [`TensorError::ModelOverflow`].
pub fn check_total_numel(params: &[ParamDesc]) -> Result<(), TensorError> {
    let numels = params.iter().map(ParamDesc::numel);
    let found = numels.fold(0, u64::saturating_add);
    if found > MAX_MODEL_NUMEL {
        return Err(TensorError::ModelOverflow { found });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MAX_NUMEL;

    fn param(name: &str) -> ParamDesc {
        ParamDesc::new(name, Shape::new([2]).unwrap(), DType::F32)
    }

    #[test]
    fn duplicate_names_are_reported_with_both_positions() {
        let error = check_unique_names(&[param("a"), param("b"), param("a")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "parameter `a` is registered twice, at positions 0 and 2; names must be unique"
        );
        assert_eq!(check_unique_names(&[param("a"), param("b")]), Ok(()));
    }

    #[test]
    fn models_are_bounded_and_so_is_every_sum_over_them() {
        let largest = ParamDesc::new("a", Shape::new([MAX_NUMEL]).unwrap(), DType::F64);
        let most = (MAX_MODEL_NUMEL / MAX_NUMEL) as usize;
        assert_eq!(check_total_numel(&vec![largest.clone(); most]), Ok(()));
        let mut params = vec![largest; most];
        params.push(param("b"));
        let error = check_total_numel(&params).unwrap_err().to_string();
        assert!(
            error.contains("at most 18014398509481984")
                && error.contains("found 18014398509481986"),
            "{error}"
        );
    }

    #[test]
    fn hyper_parameters_must_be_finite_and_not_negative() {
        for bad in [-1.0, f64::NAN, f64::INFINITY] {
            let mut scaled = param("a");
            scaled.lr_scale = bad;
            assert!(scaled.validate().is_err());
            let mut decayed = param("a");
            decayed.weight_decay = Some(bad);
            assert!(decayed.validate().is_err());
        }
        assert_eq!(param("a").validate(), Ok(()));
    }

    #[test]
    fn hyper_parameters_that_f32_has_as_infinite_are_refused_unless_the_parameter_is_f64() {
        for (dtype, taken) in [(DType::F32, false), (DType::BF16, false), (DType::F64, true)] {
            let scaled = ParamDesc { dtype, lr_scale: 1e300, ..param("a") };
            let decayed = ParamDesc { dtype, weight_decay: Some(1e300), ..param("a") };
            for (desc, what) in [(scaled, "lr_scale"), (decayed, "weight_decay")] {
                let checked = desc.validate();
                assert_eq!(checked.is_ok(), taken, "{dtype} {what}");
                let Err(error) = checked else { continue };
                let error = error.to_string();
                assert!(error.starts_with(&format!("{what} of `a`: expected at most 3.4e38")));
                assert!(error.ends_with("found 1e300"), "{error}");
            }
        }
    }
}
