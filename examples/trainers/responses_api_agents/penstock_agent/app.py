"""NeMo-Gym runs rollouts of an agent: `gym env start "+config_paths=[penstock_agent.yaml,...]"`.

NeMo-Gym takes this folder for the server `penstock_agent` where its grandparent is the working directory. Its model
server answers the agent's model calls.
"""

from penstock.adapters.trainers.plugins.nemo_gym import PenstockAgent

if __name__ == "__main__":
    PenstockAgent.run_webserver()
