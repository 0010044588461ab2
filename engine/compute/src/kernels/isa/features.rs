//! The CPU features of each instruction set, in one list: the same macro compiles functions with them and detects them.

/// Hands the feature list of an [`Isa`](super::super::Isa) to the macro `$then`: [`enable_features`] or [`has_features`].
macro_rules! isa_features {
    (Avx2, $then:ident $($args:tt)*) => { $then! { ["avx2" "fma" "f16c"] $($args)* } };
    (AvxVnni, $then:ident $($args:tt)*) => { $then! { ["avx2" "fma" "f16c" "avxvnni"] $($args)* } };
    (Avx512Vnni, $then:ident $($args:tt)*) => {
        $then! { ["avx2" "f16c" "avx512f" "avx512bw" "avx512vl" "avx512dq" "avx512vnni"] $($args)* }
    };
    (NeonDotprod, $then:ident $($args:tt)*) => { $then! { ["dotprod"] $($args)* } };
}

/// Compiles a function with the features of the list.
macro_rules! enable_features {
    ([$($feature:tt)+] $function:item) => { #[target_feature($(enable = $feature),+)] $function };
}

/// Whether the machine has all features of the list: asked at run time, or known from the build without `std`.
macro_rules! has_features {
    ([$($feature:tt)+]) => { $(has_feature!($feature))&&+ };
}

#[cfg(all(feature = "std", target_arch = "x86_64"))]
macro_rules! has_feature {
    ($feature:tt) => {
        std::arch::is_x86_feature_detected!($feature)
    };
}
#[cfg(all(feature = "std", target_arch = "aarch64"))]
macro_rules! has_feature {
    ($feature:tt) => {
        std::arch::is_aarch64_feature_detected!($feature)
    };
}
#[cfg(not(feature = "std"))]
macro_rules! has_feature {
    ($feature:tt) => {
        cfg!(target_feature = $feature)
    };
}

pub(in crate::kernels) use {enable_features, has_feature, has_features, isa_features};
