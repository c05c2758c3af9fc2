# A trainer in Ruby, with nothing but what protoc generates from protos/: docs/guides/any-language.md explains it.
#
#     ruby -I STUBS trainer.rb TASK.json [ROLLOUTS]
#
# It starts a group of rollouts of one task, answers the model calls of their agents with tokens that the inference
# service samples, and prints what came of each. The services are those of `penstock up`; PENSTOCK_CONNECTION names the
# file with their addresses and the token.

require "json"
require "securerandom"
require "penstock/driver/v1/rollout_service_services_pb"
require "penstock/inference/v1/inference_service_services_pb"
require "penstock/interception/v1/intercept_service_services_pb"

Chat = Penstock::Chat::V1
Driver = Penstock::Driver::V1
Inference = Penstock::Inference::V1
Interception = Penstock::Interception::V1
Trajectories = Penstock::Trajectory::V1

MAX_MESSAGE_BYTES = 64 << 20

# The services' stubs, and the token that every RPC carries.
class Services
  attr_reader :driver, :gate, :engine, :metadata

  def initialize(connection)
    @metadata = { "authorization" => "Bearer #{connection.fetch("token")}" }
    addresses = connection.fetch("addresses")
    options = { "grpc.max_receive_message_length" => MAX_MESSAGE_BYTES }
    open = ->(stub, name) { stub.new(addresses.fetch(name), :this_channel_is_insecure, channel_args: options) }
    @driver = open.(Driver::RolloutService::Stub, "driver")
    @gate = open.(Interception::InterceptService::Stub, "interception")
    @engine = open.(Inference::InferenceService::Stub, "inference")
  end
end

# One session at the gate: it receives the calls of a run and answers each of them.
class Session
  attr_reader :answered, :rejected

  def initialize(services, run_id)
    @services = services
    @frames = Queue.new
    @answered = 0
    @rejected = []
    @ready = Queue.new
    send_frame(hello: Interception::Hello.new(
      selector: Interception::CallSelector.new(run_id: run_id),
      credits: Interception::Credits.new(calls: 8),
      identity: "ruby",
      policy_version: 0,
      max_message_bytes: MAX_MESSAGE_BYTES,
    ))
    @reader = Thread.new { read }
    @reader.report_on_exception = false
    @ready.pop or @reader.value # raises why the gate refused the session
  end

  def finish
    send_frame(goodbye: Interception::Goodbye.new(reason: "done"))
    @reader.value # raises what the session ended with
  end

  private

  def send_frame(**frame)
    @frames << Interception::InterceptRequest.new(**frame)
  end

  def read
    outgoing = Enumerator.new { |sink| loop { sink << @frames.pop } }
    @services.gate.intercept(outgoing, metadata: @services.metadata).each do |message|
      case message.frame
      when :welcome then begin_heartbeats(message.welcome)
      when :calls then message.calls.calls.each { |call| Thread.new { answer(call) } }
      when :acknowledged
        @answered += message.acknowledged.accepted_call_ids.size
        @rejected.concat(message.acknowledged.rejected.to_a)
      end
    end
  ensure
    @heartbeats&.kill
    @ready << false
  end

  # The gate ends a session of which it has not heard for three intervals.
  def begin_heartbeats(welcome)
    every = welcome.heartbeat_interval.seconds / 2.0
    @heartbeats = Thread.new { loop { sleep(every); send_frame(heartbeat: Interception::Heartbeat.new) } }
    @ready << true
  end

  # Token ids and logprobs go from the engine to the gate as they are: packed little-endian int32 and float32.
  def answer(call)
    request = Inference::GenerateRequest.new(
      request_id: SecureRandom.hex(16), session_id: call.rollout_id,
      token_ids: call.prompt_token_ids, sampling: call.sampling,
    )
    events = @services.engine.generate(request, metadata: @services.metadata)
    completion = events.filter_map { |event| event.done&.completion }.first or raise "the engine sent no completion"
    deliver(call, completion: completion)
  rescue StandardError => error # a call without an answer would wait until it expires
    failure = Interception::CallFailure.new(reason: "ENGINE_FAILED", message: error.message, retriable: true)
    deliver(call, failure: failure)
  end

  def deliver(call, **result)
    given = Interception::CallResult.new(call_id: call.call_id, lease_id: call.lease_id, **result)
    send_frame(results: Interception::Results.new(results: [given]))
  end
end

# A long poll answers at four fifths of its deadline at the latest, whether the group has ended or not.
def wait_for(services, group_id)
  loop do
    request = Driver::WaitGroupRequest.new(group_id: group_id)
    group = services.driver.wait_group(request, metadata: services.metadata, deadline: Time.now + 30).group
    return group if group.ended
  end
end

# A trajectory comes in pieces, each of them a message of the same type: joined, they parse as the whole.
def trajectory_of(services, rollout_id)
  request = Driver::GetTrajectoryRequest.new(rollout_id: rollout_id)
  pieces = services.driver.get_trajectory(request, metadata: services.metadata)
  Trajectories::Trajectory.decode(pieces.map { |piece| piece.trajectory.to_proto }.join)
rescue GRPC::FailedPrecondition # the rollout failed before its agent ran
  Trajectories::Trajectory.new
end

def report(rollout, trajectory)
  reward = rollout.outcome.reward&.value
  puts "#{rollout.rollout_id} reward #{reward.inspect} #{trajectory.grade} #{rollout.outcome.failure&.reason}"
  trajectory.samples.each do |sample|
    ids = sample.input_ids.unpack("l<*")
    trained = sample.loss_mask.bytes.sum
    logprobs = sample.logprobs.unpack("e*")
    puts "  sample of #{ids.size} tokens, #{trained} to train on, lowest logprob #{logprobs.min&.round(3)}"
  end
end

connection = JSON.parse(File.read(ENV.fetch("PENSTOCK_CONNECTION")))
task = Driver::Task.decode_json(File.read(ARGV.fetch(0)))
count = Integer(ARGV.fetch(1, "4"))
services = Services.new(connection)
run_id = "ruby-#{SecureRandom.hex(8)}"

session = Session.new(services, run_id)
spec = Driver::RolloutSpec.new(
  task: task, agent: Driver::AgentChoice.new(name: "shell"), mode: :MODE_INTERCEPTION_GATE, run_id: run_id,
)
create = Driver::CreateGroupRequest.new(request_id: SecureRandom.hex(16), spec: spec, size: count)
group = services.driver.create_group(create, metadata: services.metadata).group
group = wait_for(services, group.group_id)
session.finish

group.rollout_ids.each do |rollout_id|
  request = Driver::GetRolloutRequest.new(rollout_id: rollout_id)
  rollout = services.driver.get_rollout(request, metadata: services.metadata).rollout
  report(rollout, trajectory_of(services, rollout_id))
end
puts "answered #{session.answered}, rejected #{session.rejected.size}"
