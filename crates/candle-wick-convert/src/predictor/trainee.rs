//! One layer's low-rank pair while it learns: AdamW on logits, with the weights of Deja Vu.
//!
//! The loss is binary cross-entropy in which an active neuron counts 1 and another one what the share of active ones
//! in the batch is, plus 0.005. Its gradient by the logits is `weight * (sigmoid(logit) - label)`, and what follows from there is
//! four products: going back through candle's graph instead would take several more passes over every logit.
//!
//! After each epoch the pair is judged on tokens it does not learn from, by the share of neurons that has to be
//! selected to reach the wanted recall; a fixed threshold would reward logits that are all a bit higher. The best pair is
//! kept, the one it started with included, and after [`PATIENCE`] epochs without a better one learning ends.
//!
//! Invariant: the same start, tokens, schedule and device give the same pair, bit for bit.
//!
//! Not here: where to start (`start`), what to do with many layers (`train`).

use candle::backprop::GradStore;
use candle::{DType, Device, Result, Tensor, Var};
use candle_nn::{ops::sigmoid, AdamW, Optimizer, ParamsAdamW};

use super::cut::Cut;
use super::factor::Factors;
use super::labels::Labels;
use super::random::Random;

/// Added to the share of active neurons: the weight of the others is never zero.
pub(super) const NEGATIVE_WEIGHT_MIN: f64 = 0.005;
/// Epochs without a better pair after which learning ends.
const PATIENCE: usize = 3;
/// Steps until the learning rate is reached; it falls to zero from there.
const WARM_UP_STEPS: usize = 20;
const WEIGHT_DECAY: f64 = 0.01;
/// Tokens judged at a time.
const ROWS: usize = 256;

/// The tokens of a layer that are learnt from, or judged on.
pub(super) struct Lesson {
    /// Inputs `(tokens, hidden)`.
    pub(super) x: Tensor,
    pub(super) labels: Labels,
}

/// How long and how fast to learn.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    pub(super) epochs: usize,
    pub(super) batch_tokens: usize,
    pub(super) learning_rate: f64,
    /// Share of the active neurons by which a pair is judged.
    pub(super) recall: f64,
    /// The order of the tokens.
    pub(super) seed: u64,
}

/// The pair, on the device it learns on.
pub(super) struct Trainee {
    down: Var,
    up: Var,
    bias: Var,
}

/// What became of it.
pub(super) struct Trained {
    pub(super) factors: Factors,
    /// Epochs that led to it.
    pub(super) epochs: usize,
}

impl Schedule {
    /// Steps of all epochs over `tokens` tokens.
    pub(super) fn steps(&self, tokens: usize) -> usize {
        self.epochs * tokens.div_ceil(self.batch_tokens)
    }

    fn rate(&self, step: usize, steps: usize) -> f64 {
        let warm_up = (step + 1) as f64 / WARM_UP_STEPS as f64;
        let left = 1.0 - step as f64 / steps.max(1) as f64;
        self.learning_rate * warm_up.min(1.0) * left
    }
}

impl Trainee {
    /// Starts from `factors`, on `device`.
    pub(super) fn new(factors: &Factors, device: &Device) -> Result<Self> {
        let var = |tensor: &Tensor| Var::from_tensor(&tensor.to_device(device)?.contiguous()?);
        Ok(Self {
            down: var(&factors.down)?,
            up: var(&factors.up)?,
            bias: var(&factors.bias)?,
        })
    }

    /// Learns from `lesson`, is judged on `exam`. `on_step` is called before each step and may end it all.
    pub(super) fn learn(
        self,
        lesson: &Lesson,
        exam: &Lesson,
        schedule: &Schedule,
        on_step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Trained> {
        let device = self.down.device().clone();
        let x = lesson.x.to_device(&device)?;
        let tokens = x.dim(0)?;
        let parameters = ParamsAdamW {
            lr: 0.0,
            weight_decay: WEIGHT_DECAY,
            ..ParamsAdamW::default()
        };
        let variables = vec![self.down.clone(), self.up.clone(), self.bias.clone()];
        let mut optimizer = AdamW::new(variables, parameters)?;
        let mut best = (self.needed(exam, schedule.recall)?, self.stored()?, 0);
        let (mut step, steps) = (0, schedule.steps(tokens));
        let mut order: Vec<u32> = (0..tokens as u32).collect();
        let mut random = Random(schedule.seed);
        for epoch in 1..=schedule.epochs {
            random.shuffle(&mut order);
            for batch in order.chunks(schedule.batch_tokens) {
                on_step()?;
                optimizer.set_learning_rate(schedule.rate(step, steps));
                let ids = Tensor::new(batch, &device)?;
                let labels = lesson.labels.rows(batch, &device)?;
                let gradients = self.gradients(&x.index_select(&ids, 0)?, &labels)?;
                optimizer.step(&gradients)?;
                step += 1;
            }
            let needed = self.needed(exam, schedule.recall)?;
            if needed < best.0 {
                best = (needed, self.stored()?, epoch);
            } else if epoch >= best.2 + PATIENCE {
                break;
            }
        }
        let (_, factors, epochs) = best;
        Ok(Trained { factors, epochs })
    }

    /// The gradient of the loss, a token's share, by the three tensors.
    fn gradients(&self, x: &Tensor, labels: &Tensor) -> Result<GradStore> {
        let tokens = x.dim(0)?;
        let share = 1.0 / tokens.max(1) as f64;
        let active = labels.mean_all()?.to_scalar::<f32>()?;
        let negative = (f64::from(active) + NEGATIVE_WEIGHT_MIN).min(1.0);
        let weights = labels.affine((1.0 - negative) * share, negative * share)?;
        let hidden = x.matmul(&self.down.t()?)?;
        let logits = hidden
            .matmul(&self.up.t()?)?
            .broadcast_add(&self.bias)?
            .detach();
        let slope = ((sigmoid(&logits)? - labels)? * weights)?;
        let slope_t = slope.t()?;
        let ones = Tensor::ones((tokens, 1), DType::F32, x.device())?;
        let of_hidden = slope.matmul(&self.up)?;
        let mut gradients = GradStore::default();
        gradients.insert(&self.down, of_hidden.t()?.matmul(x)?);
        gradients.insert(&self.up, slope_t.matmul(&hidden)?);
        gradients.insert(&self.bias, slope_t.matmul(&ones)?.squeeze(1)?);
        Ok(gradients)
    }

    fn logits(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.down.t()?)?
            .matmul(&self.up.t()?)?
            .broadcast_add(&self.bias)
    }

    /// The share of neurons that the pair needs for `recall`.
    fn needed(&self, exam: &Lesson, recall: f64) -> Result<f64> {
        let device = self.down.device();
        let (tokens, neurons) = (exam.x.dim(0)?, self.bias.elem_count());
        let cut = Cut::find(recall, |pass| -> Result<()> {
            for start in (0..tokens).step_by(ROWS) {
                let rows = exam.x.narrow(0, start, ROWS.min(tokens - start))?;
                let logits = self.logits(&rows.to_device(device)?)?;
                let logits = logits.flatten_all()?.to_vec1::<f32>()?;
                for (row, logits) in logits.chunks(neurons.max(1)).enumerate() {
                    for (logit, is_active) in logits.iter().zip(exam.labels.token(start + row)) {
                        pass.push(*logit, is_active);
                    }
                }
            }
            Ok(())
        });
        Ok(cut?.selected_fraction)
    }

    /// The pair with the values that a file can hold.
    fn stored(&self) -> Result<Factors> {
        let copy = |var: &Var| var.as_detached_tensor().to_device(&Device::Cpu)?.copy();
        let factors = Factors {
            down: copy(&self.down)?,
            up: copy(&self.up)?,
            bias: copy(&self.bias)?,
        };
        factors.rounded(DType::F16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wide layer seen through few directions: half of its inputs' variance lies in two of them.
    fn lessons() -> (Lesson, Lesson) {
        let (hidden, neurons) = (8, 40);
        let mut random = Random(5);
        let mut values = |count: usize, radius: f32| -> Vec<f32> {
            (0..count).map(|_| random.uniform(radius)).collect()
        };
        let weight = Tensor::from_vec(
            values(neurons * hidden, 1.0),
            (neurons, hidden),
            &Device::Cpu,
        );
        let weight = weight.unwrap();
        let mut lesson = |tokens: usize| {
            let scale: Vec<f32> = (0..hidden).map(|i| 2.0 / (1 + i) as f32).collect();
            let scale = Tensor::new(scale, &Device::Cpu).unwrap();
            let x = Tensor::from_vec(values(tokens * hidden, 1.0), (tokens, hidden), &Device::Cpu);
            let x = x.unwrap().broadcast_mul(&scale).unwrap();
            let exact = x.matmul(&weight.t().unwrap()).unwrap();
            let mut labels = Labels::new(neurons);
            for row in exact.to_vec2::<f32>().unwrap() {
                labels.push(row.iter().map(|value| *value > 0.8));
            }
            Lesson { x, labels }
        };
        (lesson(1500), lesson(400))
    }

    fn random_pair(rank: usize) -> Factors {
        let mut random = Random(9);
        let mut tensor = |shape: (usize, usize)| {
            let values: Vec<f32> = (0..shape.0 * shape.1)
                .map(|_| random.uniform(0.4))
                .collect();
            Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
        };
        Factors {
            down: tensor((rank, 8)),
            up: tensor((40, rank)),
            bias: Tensor::zeros(40, DType::F32, &Device::Cpu).unwrap(),
        }
    }

    fn schedule(epochs: usize) -> Schedule {
        Schedule {
            epochs,
            batch_tokens: 50,
            learning_rate: 0.02,
            recall: 0.95,
            seed: 3,
        }
    }

    #[test]
    fn learning_selects_less_for_the_same_recall_and_does_it_again_alike() {
        let (lesson, exam) = lessons();
        let needed = |factors: &Factors| {
            let trainee = Trainee::new(factors, &Device::Cpu).unwrap();
            trainee.needed(&exam, 0.95).unwrap()
        };
        let learn = |epochs| {
            let trainee = Trainee::new(&random_pair(3), &Device::Cpu).unwrap();
            let mut steps = 0;
            let mut count = || {
                steps += 1;
                Ok(())
            };
            let trained = trainee.learn(&lesson, &exam, &schedule(epochs), &mut count);
            (trained.unwrap(), steps)
        };
        let (before, (trained, steps)) = (needed(&random_pair(3)), learn(8));
        let after = needed(&trained.factors);
        assert!(after < 0.7 * before, "{after} of {before}");
        assert!(trained.epochs > 0 && steps <= schedule(8).steps(1500));
        let (again, _) = learn(8);
        let values = |trained: &Trained| trained.factors.up.flatten_all().unwrap().to_vec1::<f32>();
        assert_eq!(values(&trained).unwrap(), values(&again).unwrap());
        // No epoch, no change but that of the rounding.
        let (untaught, steps) = learn(0);
        assert_eq!((untaught.epochs, steps), (0, 0));
        assert!((needed(&untaught.factors) - before).abs() < 0.01);
    }

    #[test]
    fn an_error_of_the_watcher_ends_it() {
        let (lesson, exam) = lessons();
        let trainee = Trainee::new(&random_pair(3), &Device::Cpu).unwrap();
        let mut stop = || Err(candle::Error::msg("stopped"));
        let error = trainee.learn(&lesson, &exam, &schedule(2), &mut stop).err();
        assert!(error.unwrap().to_string().contains("stopped"));
    }

    /// By differences, of each of the three tensors.
    #[test]
    fn the_gradient_is_that_of_the_weighted_cross_entropy() {
        let (lesson, _) = lessons();
        let ids: Vec<u32> = (0..20).collect();
        let x = lesson.x.narrow(0, 0, 20).unwrap();
        let labels = lesson.labels.rows(&ids, &Device::Cpu).unwrap();
        let share = labels.mean_all().unwrap().to_scalar::<f32>().unwrap();
        let negative = f64::from(share) + NEGATIVE_WEIGHT_MIN;
        let loss = |factors: &Factors| -> f64 {
            let logits = factors.scores(&x).unwrap().flatten_all().unwrap();
            let labels = labels.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let logits = logits.to_vec1::<f32>().unwrap();
            let terms = logits.iter().zip(labels).map(|(logit, label)| {
                let p = 1.0 / (1.0 + (-f64::from(*logit)).exp());
                match label > 0.5 {
                    true => -p.ln(),
                    false => -negative * (1.0 - p).ln(),
                }
            });
            terms.sum::<f64>() / 20.0
        };
        let trainee = Trainee::new(&random_pair(3), &Device::Cpu).unwrap();
        let gradients = trainee.gradients(&x, &labels).unwrap();
        let shifted = |variable: usize, place: usize, by: f32| {
            let pair = random_pair(3);
            let mut tensors = [pair.down, pair.up, pair.bias];
            let tensor = &mut tensors[variable];
            let mut values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            values[place] += by;
            *tensor = Tensor::from_vec(values, tensor.dims(), &Device::Cpu).unwrap();
            let [down, up, bias] = tensors;
            loss(&Factors { down, up, bias })
        };
        let variables = [&trainee.down, &trainee.up, &trainee.bias];
        for (variable, place) in [(0, 0), (0, 13), (1, 5), (1, 118), (2, 0), (2, 39)] {
            let step = 0.01;
            let higher = shifted(variable, place, step);
            let difference = (higher - shifted(variable, place, -step)) / (2.0 * f64::from(step));
            let got = gradients.get(variables[variable]).unwrap();
            let got = got.flatten_all().unwrap().to_vec1::<f32>().unwrap()[place];
            let error = (f64::from(got) - difference).abs();
            assert!(
                error < 2e-3 * (1.0 + difference.abs()),
                "{variable}: {got} {difference}"
            );
        }
    }
}
