#if canImport(FoundationModels, _version: 2)
    import Foundation
    import FoundationModels
    import Testing

    @testable import MLXInferClient
    @testable import MLXInferFoundationModels

    /// Requests of sessions against recorded files: what is sent, the server's answer, and what the session gets.
    ///
    /// `MLXINFER_UPDATE_GOLDEN=1 swift test --filter SessionGoldenTests` writes what is sent and what arrives anew, to be read as a change.
    struct SessionGoldenTests {
        private struct Case: Codable {
            struct Refusal: Codable {
                var status: Int
                var headers: [String: String]
                var body: JSONValue
            }

            var name: String
            var events: [JSONValue]?
            var cut: Bool?
            var refusal: Refusal?
            var request: JSONValue?
            var calls: [String]?
            var error: String?

            /// The answer as the bytes of a connection.
            var answer: [UInt8] {
                if let refusal {
                    let fields = refusal.headers.map { "\($0.key): \($0.value)\r\n" }.joined()
                    return MLXInferClientTests.Transcript.json("\(refusal.body)", status: "\(refusal.status) Refused", fields: fields)
                }
                let lines = (events ?? []).map { "data: \($0)\n\n" }
                let isCut = cut ?? false
                return MLXInferClientTests.Transcript.stream(lines + (isCut ? [] : [MLXInferClientTests.Transcript.done]), end: !isCut)
            }
        }

        private static let folder = URL(fileURLWithPath: #filePath).deletingLastPathComponent().deletingLastPathComponent()
        private static let updates = ProcessInfo.processInfo.environment["MLXINFER_UPDATE_GOLDEN"] != nil

        private func file(_ name: String) -> URL { Self.folder.appendingPathComponent("Golden/Sessions/\(name).json") }

        @available(macOS 27, iOS 27, *)
        @Test(arguments: ["text", "tools", "schemas", "options", "failures"]) func sessions(_ name: String) async throws {
            var cases = try JSONDecoder().decode([Case].self, from: Data(contentsOf: file(name)))
            let requests = try #require(SessionCases.all[name])
            #expect(Set(cases.map(\.name)) == Set(requests.keys))
            for index in cases.indices {
                let make = try #require(requests[cases[index].name])
                let found = try await exchange(cases[index], make())
                if Self.updates {
                    (cases[index].request, cases[index].calls, cases[index].error) = (found.request, found.calls, found.error)
                } else {
                    let expected = cases[index]
                    #expect(comparable(found.request) == comparable(expected.request), "\(expected.name)")
                    #expect(found.calls == expected.calls, "\(expected.name)")
                    #expect(found.error == expected.error, "\(expected.name)")
                }
            }
            if Self.updates { try write(cases, to: file(name)) }
        }

        @available(macOS 27, iOS 27, *)
        private func exchange(
            _ golden: Case, _ request: LanguageModelExecutorGenerationRequest
        ) async throws -> (request: JSONValue?, calls: [String], error: String?) {
            let server = try FaultServer([.read, .send(golden.answer)])
            let model = MLXInferLanguageModel(model: "tiny", endpoint: .unix(path: server.path), reconnect: .never)
            let executor = MLXInferLanguageModel.Executor(configuration: model.executorConfiguration)
            let (calls, error) = await translated(request, server.client)
            #if os(Linux)
                let channel = LanguageModelExecutorGenerationChannel()
                var failure: String?
                do {
                    try await executor.respond(to: request, model: model, streamingInto: channel)
                } catch {
                    failure = describe(error)
                }
                #expect(failure == error)
                #expect(try await events(of: channel) == calls)
            #endif
            let body = server.requests.first?.components(separatedBy: "\r\n\r\n").last
            return (try body.map { try JSONValue(parsing: $0) }, calls, error)
        }

        /// The same without a session: the calls, and the error at their end.
        @available(macOS 27, iOS 27, *)
        private func translated(_ request: LanguageModelExecutorGenerationRequest, _ client: Client) async -> ([String], String?) {
            var calls: [String] = []
            do {
                let sent = try SentRequest(request)
                var answer = ChannelCalls(mustBeWhole: request.schema != nil)
                do {
                    for try await event in client.chat(sent.chat) { calls += try answer.calls(for: event).map(describe) }
                    calls += try answer.end().map(describe)
                } catch {
                    return (calls, describe(sent.languageModelError(error)))
                }
                return (calls, nil)
            } catch {
                return (calls, describe(error))
            }
        }

        /// What does not depend on how this system encodes a schema.
        private func comparable(_ request: JSONValue?) -> JSONValue? {
            #if os(Linux)
                return request
            #else
                guard case .object(var object) = request else { return request }
                (object["tools"], object["response_format"]) = (nil, nil)
                return .object(object)
            #endif
        }

        private func write(_ cases: [Case], to file: URL) throws {
            let encoder = JSONEncoder()
            encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
            let lines = try cases.map { String(decoding: try encoder.encode($0), as: UTF8.self) }
            try Data("[\n\(lines.joined(separator: ",\n"))\n]\n".utf8).write(to: file)
        }
    }

    @available(macOS 27, iOS 27, *)
    private func describe(_ call: ChannelCall) -> String {
        switch call {
        case .response(let text): "response \(text.debugDescription)"
        case .reasoning(let text): "reasoning \(text.debugDescription)"
        case .toolCall(let id, let name, let arguments): "toolCall \(id) \(name) \(arguments.debugDescription)"
        case .metadata(let values, let kind): "\(kind) metadata \(described(values))"
        case .usage(let usage, let kind):
            "\(kind) usage \(usage.promptTokens) (\(usage.cachedTokens) cached) \(usage.completionTokens) (\(usage.reasoningTokens) reasoning)"
        }
    }

    private func described(_ values: [String: String]) -> String {
        values.sorted { $0.key < $1.key }.map { "\($0.key)=\($0.value)" }.joined(separator: " ")
    }

    @available(macOS 27, iOS 27, *)
    private func describe(_ error: any Error) -> String {
        guard let error = error as? LanguageModelError else { return "MLXInferError: \(error)" }
        switch error {
        case .contextSizeExceeded(let found): return "contextSizeExceeded \(found.tokenCount) of \(found.contextSize)"
        case .rateLimited(let found):
            return "rateLimited \(found.resetDate.map { "\(Int($0.timeIntervalSinceNow.rounded(.up))) s" } ?? "")"
        case .guardrailViolation: return "guardrailViolation"
        case .unsupportedCapability(let found): return "unsupportedCapability \(found.capability == .vision ? "vision" : "toolCalling")"
        case .unsupportedTranscriptContent(let found):
            return "unsupportedTranscriptContent \(found.unsupportedContent.map(\.id)): \(found.debugDescription)"
        case .unsupportedGenerationGuide(let found): return "unsupportedGenerationGuide \(found.schemaName ?? "")"
        case .timeout: return "timeout"
        default: return "another case"
        }
    }
#endif
