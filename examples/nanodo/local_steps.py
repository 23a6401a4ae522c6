"""What nanodo's trainer takes to make local steps: four of its names, replaced from outside."""

import jax

import local_opt

WORKERS = 4  # simulated; or jax.sharding.Mesh(jax.devices(), ("worker",)), one per device


def plan_of(arm, rate, opt):
    if arm == "constant":
        return local_opt.constant(4, total_steps=opt.num_train_steps)
    if arm == "qsr":
        return local_opt.qsr(
            rate,
            total_steps=opt.num_train_steps,
            alpha=2 * opt.peak_learning_rate,
            h_base=4,
            warmup_steps=opt.warmup_steps,
        )
    if arm != "plain":
        raise ValueError(f"--arm has {arm!r}: pass some of plain,constant,qsr.")
    return None


def adopted(train, evaluate, plan):
    """[(where, name, what stands there instead)]."""

    def init(*args, **kwargs):
        shardings, state = train_init(*args, **kwargs)
        return shardings, local_opt.owned(state, WORKERS)

    def step(state, in_BxL, *, mesh, **kwargs):
        def of_one(state, in_BxL):
            return train_step(state, in_BxL, **kwargs)

        lifted = local_opt.lift(of_one, WORKERS, inputs="owned split", outputs="owned mean")
        return lifted(state, in_BxL)

    def sync_one(state):
        return state.replace(params=local_opt.synchronize(state.params, axis_name="worker"))

    class Trainer(train.Trainer):
        @property
        def step(self):
            return int(self.state.step[0])

        def do_step(self, step, in_BxL):
            metrics = super().do_step(step, in_BxL)
            if step < plan.total_steps and plan.syncs_after(step):
                self.state = sync(self.state)
            return metrics

    class Evaluator(evaluate.Evaluator):
        def eval(self, params):
            return super().eval(local_opt.consolidate(params))

    train_init, train_step = train._init_train_state, train._train_step
    sync = jax.jit(local_opt.lift(sync_one, WORKERS, inputs="owned", outputs="owned"))
    return [
        (train, "_init_train_state", init),
        (train, "_train_step", step),
        (train, "Trainer", Trainer),
        (evaluate, "Evaluator", Evaluator),
    ]
