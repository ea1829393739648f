import copy, pickle
import torch, fusestep.torch as ft
torch.manual_seed(0); torch.set_num_threads(2)
def run(ours, theirs, dtype, **kw):
    P=[torch.nn.Parameter(torch.randn(s,dtype=dtype)) for s in [(3,4),(7,),(130,70)]]
    Q=[torch.nn.Parameter(p.detach().clone()) for p in P]
    a,b=ours(P,**kw),theirs(Q,**kw)
    for k in range(12):
        for i,(p,q) in enumerate(zip(P,Q)):
            p.grad = None if (k+i)%5==4 else torch.randn(p.shape).to(dtype); q.grad = None if p.grad is None else p.grad.clone()
        a.step(); b.step()
    d=max(float((p-q).abs().max()) for p,q in zip(P,Q))
    b2=theirs(Q,**kw); b2.load_state_dict(a.state_dict()); a2=ours(P,**kw); a2.load_state_dict(b.state_dict())
    pickle.loads(pickle.dumps(a)); copy.deepcopy(a)
    assert d<(1e-5 if dtype!=torch.bfloat16 else 1e-1), (ours.__name__, kw, dtype, d)
    return d
for dt in (torch.float32,torch.float64):
    for n,kws in {"AdamW":[{},{"amsgrad":True},{"maximize":True}],"Adam":[{"weight_decay":.1}],"SGD":[{"lr":.1},{"lr":.1,"momentum":.9},{"lr":.1,"momentum":.9,"nesterov":True},{"lr":.1,"momentum":.9,"dampening":.5}],"Adagrad":[{},{"initial_accumulator_value":.1,"lr_decay":.5}],"RMSprop":[{},{"momentum":.9,"centered":True}]}.items():
        for kw in kws: print(n,kw,dt,run(getattr(ft,n),getattr(torch.optim,n),dt,**kw))
for n in ("Lion","Lars","Lamb","ScheduleFreeAdamW"):
    p=torch.nn.Parameter(torch.randn(9,9)); o=getattr(ft,n)([p],clip_norm=1.0,update_norms=True); p.grad=torch.randn(9,9); o.step(); print(n,o.report())
print(o.plan()[:300])
