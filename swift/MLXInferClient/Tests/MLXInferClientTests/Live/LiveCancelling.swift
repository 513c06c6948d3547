import Foundation
import Testing

@testable import MLXInferClient

extension LiveTests.Cancelling {
    private var server: LiveServer { LiveServer.shared }

    private func endless(_ prompt: String = "Tell me a long story.") -> ChatRequest {
        var request = ChatRequest([.user(prompt)], options: SamplingOptions(maxTokens: 1500))
        request.additionalFields = ["ignore_eos": true]
        return request
    }

    @Test func theServerStopsAtOnce() async throws {
        var delays: [Duration] = []
        for _ in 0..<5 {
            let cancelled = try await server.metric("mlxinfer_requests_cancelled_total")
            let before = try await server.metric("mlxinfer_engine_steps_total")
            let start = try #require(await cancelBehindFivePieces())
            #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
            delays.append(.now - start)
            let steps = try await server.metric("mlxinfer_engine_steps_total")
            #expect(try await eventually { try await server.metric("mlxinfer_requests_cancelled_total") == cancelled + 1 })
            #expect(try await server.metric("mlxinfer_engine_steps_total") == steps && steps - before < 500)
            print("read 5 pieces of 1500 tokens; the engine made \(Int(steps - before)) steps")
        }
        print("from cancelling to no running request, as /metrics shows it: \(delays.sorted())")
    }

    /// When a task that reads an endless answer was cancelled; nil if that did not end it.
    private func cancelBehindFivePieces() async -> ContinuousClock.Instant? {
        let (client, request) = (server.client, endless())
        return await Task {
            var (pieces, start) = (0, ContinuousClock.now)
            do {
                for try await event in client.chat(request) {
                    if case .text = event { pieces += 1 }
                    guard pieces == 5 else { continue }
                    start = .now
                    withUnsafeCurrentTask { $0?.cancel() }
                }
                return nil
            } catch {
                return error as? MLXInferError == .cancelled ? start : nil
            }
        }.value
    }

    @Test func beforeTheFirstToken() async throws {
        let cancelled = try await server.metric("mlxinfer_requests_cancelled_total")
        let client = server.client
        let request = endless(String(repeating: "All work and no play makes Jack a dull boy. ", count: 120))
        let task = Task { try await client.respond(to: request) }
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 1 })
        task.cancel()
        await #expect(throws: MLXInferError.cancelled) { try await task.value }
        #expect(try await eventually { try await server.metric("mlxinfer_requests_cancelled_total") == cancelled + 1 })
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
    }

    @Test func leavingTheLoop() async throws {
        for try await event in server.client.chat(endless()) { if case .text = event { break } }
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
        #expect(try await server.metric("mlxinfer_kv_cache_pages_used") == 0)
    }
}
