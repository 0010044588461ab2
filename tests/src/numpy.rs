//! The random numbers of NumPy's `Generator(PCG64(seed))` in f32, bit for bit, so that models described by seeds need
//! not be stored. Algorithms: `SeedSequence`, PCG64 (XSL-RR) and the ziggurat method of Marsaglia and Tsang with 256
//! layers.

use std::sync::LazyLock;

const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;
/// Start of the ziggurat's tail, and the area of a layer.
const TAIL: f64 = 3.654_152_885_361_009;
const AREA: f64 = 0.004_928_673_233_974_658;
const MANTISSA: f64 = 8_388_608.0;

/// A generator.
pub struct Generator {
    state: u128,
    increment: u128,
    /// The high half of the last 64 bits.
    half: Option<u32>,
}

/// Pool of a `SeedSequence` after mixing in the entropy.
fn seed_pool(seed: u128) -> [u32; 4] {
    let mut words: Vec<u32> = (0..4).map(|i| (seed >> (32 * i)) as u32).collect();
    while words.len() > 1 && words.last() == Some(&0) {
        words.pop();
    }
    let mut constant = 0x43b0_d7e5u32;
    let mut hash = |value: u32| {
        let value = value ^ constant;
        constant = constant.wrapping_mul(0x931e_8875);
        let value = value.wrapping_mul(constant);
        value ^ (value >> 16)
    };
    let mix = |x: u32, y: u32| {
        let z = 0xca01_f9ddu32.wrapping_mul(x).wrapping_sub(0x4973_f715u32.wrapping_mul(y));
        z ^ (z >> 16)
    };
    let mut pool = [0; 4];
    for (i, p) in pool.iter_mut().enumerate() {
        *p = hash(words.get(i).copied().unwrap_or(0));
    }
    for from in 0..4 {
        for to in (0..4).filter(|to| *to != from) {
            pool[to] = mix(pool[to], hash(pool[from]));
        }
    }
    pool
}

impl Generator {
    /// The generator of `PCG64(seed)`.
    pub fn new(seed: u128) -> Generator {
        let pool = seed_pool(seed);
        let mut constant = 0x8b51_f9ddu32;
        let words: Vec<u32> = (0..8)
            .map(|i| {
                let value = pool[i % 4] ^ constant;
                constant = constant.wrapping_mul(0x58f3_8ded);
                let value = value.wrapping_mul(constant);
                value ^ (value >> 16)
            })
            .collect();
        let word = |i: usize| u128::from(words[2 * i]) | u128::from(words[2 * i + 1]) << 32;
        let (state, sequence) = (word(0) << 64 | word(1), word(2) << 64 | word(3));
        let mut generator = Generator { state: 0, increment: sequence << 1 | 1, half: None };
        generator.step();
        generator.state = generator.state.wrapping_add(state);
        generator.step();
        generator
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next_u32(&mut self) -> u32 {
        if let Some(half) = self.half.take() {
            return half;
        }
        self.step();
        let bits = ((self.state >> 64) as u64 ^ self.state as u64).rotate_right((self.state >> 122) as u32);
        self.half = Some((bits >> 32) as u32);
        bits as u32
    }

    /// As `random(dtype=float32)`: uniform in [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// As `standard_normal(dtype=float32)`.
    pub fn normal(&mut self) -> f32 {
        let tables = &*TABLES;
        loop {
            let bits = self.next_u32();
            let (layer, sign, magnitude) = ((bits & 0xff) as usize, bits >> 8 & 1, bits >> 9);
            let x = magnitude as f32 * tables.width[layer];
            let x = if sign == 1 { -x } else { x };
            if magnitude < tables.inside[layer] {
                return x;
            }
            if layer == 0 {
                loop {
                    let x = -(1.0 / TAIL) as f32 * (-self.uniform()).ln_1p();
                    let y = -(-self.uniform()).ln_1p();
                    if y + y > x * x {
                        let x = TAIL as f32 + x;
                        return if magnitude >> 8 & 1 == 1 { -x } else { x };
                    }
                }
            }
            let [above, here] = [layer - 1, layer].map(|i| tables.density[i]);
            if f64::from((above - here) * self.uniform() + here) < (-0.5 * f64::from(x) * f64::from(x)).exp() {
                return x;
            }
        }
    }
}

/// Layers of the ziggurat: right edges over 2^23, magnitudes that are surely inside, densities at the edges.
struct Tables {
    width: [f32; 256],
    inside: [u32; 256],
    density: [f32; 256],
}

static TABLES: LazyLock<Tables> = LazyLock::new(|| {
    let density = |x: f64| (-0.5 * x * x).exp();
    let mut edge = [0.0f64; 256];
    edge[255] = TAIL;
    for i in (1..255).rev() {
        edge[i] = (-2.0 * (AREA / edge[i + 1] + density(edge[i + 1])).ln()).sqrt();
    }
    let base = AREA / density(TAIL);
    let mut tables = Tables { width: [0.0; 256], inside: [0; 256], density: [1.0; 256] };
    tables.width[0] = (base / MANTISSA) as f32;
    tables.inside[0] = (TAIL / base * MANTISSA).round() as u32;
    for i in 1..256 {
        tables.width[i] = (edge[i] / MANTISSA) as f32;
        tables.inside[i] = (edge[i - 1] / edge[i] * MANTISSA).round() as u32;
        tables.density[i] = density(edge[i]) as f32;
    }
    tables
});

#[cfg(test)]
mod tests {
    use super::Generator;

    /// Values of NumPy 2.4.6.
    #[test]
    fn numbers_of_numpy() {
        let mut g = Generator::new(7);
        assert_eq!([(); 3].map(|()| g.uniform().to_bits()), [1064428874, 1059063361, 1060054634]);
        let mut g = Generator::new((1 << 100) + 5);
        let all: Vec<f32> = (0..1_000_000).map(|_| g.normal()).collect();
        // the largest is from the tail
        assert_eq!([all[0], all[999_999]].map(f32::to_bits), [3218800398, 3215278954]);
        assert_eq!(all.iter().copied().fold(0.0, f32::max).to_bits(), 1084299241);
    }
}
