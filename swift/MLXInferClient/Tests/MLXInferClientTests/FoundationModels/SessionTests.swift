#if canImport(FoundationModels, _version: 2)
    import Foundation
    import FoundationModels
    import MLXInferFoundationModels
    import Testing

    @testable import MLXInferClient

    /// Sessions with a server that says what a test wants. They use what Apple has published, and no more.
    @Suite(.timeLimit(.minutes(1))) struct SessionTests {
        private typealias Answer = MLXInferClientTests.Transcript

        private static let call = Answer.stream([
            Answer.delta(#"{"content":"Let me look."}"#),
            Answer.delta(
                #"{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"weather","arguments":"{\"city\":"}}]}"#),
            Answer.delta(#"{"tool_calls":[{"index":0,"function":{"arguments":"\"Rome\"}"}}]}"#),
            Answer.delta("{}", finish: #""tool_calls""#), Answer.usage, Answer.done,
        ])

        private func body(_ server: FaultServer, _ index: Int) throws -> JSONValue {
            try JSONValue(parsing: #require(server.requests[index].components(separatedBy: "\r\n\r\n").last))
        }

        @available(macOS 27, iOS 27, *)
        private func model(_ server: FaultServer) -> MLXInferLanguageModel {
            MLXInferLanguageModel(model: "tiny", endpoint: .unix(path: server.path), reconnect: .never)
        }

        @available(macOS 27, iOS 27, *)
        @Test func aConversationKeepsItsTranscriptAndItsUsage() async throws {
            let server = try FaultServer([.read, .send(Answer.chat)])
            let session = LanguageModelSession(model: model(server), instructions: "Be short.")
            let first = try await session.respond(to: "Hello")
            #expect(first.content == "Grüße 🙂" && first.usage.totalTokenCount == 7 && first.usage.input.cachedTokenCount == 3)
            _ = try await session.respond(to: "Again")
            #expect(session.transcript.count == 5 && session.usage.totalTokenCount == 14)
            let expected: JSONValue = [
                ["role": "system", "content": "Be short."], ["role": "user", "content": "Hello"],
                ["role": "assistant", "content": "Grüße 🙂"], ["role": "user", "content": "Again"],
            ]
            #expect(try body(server, 1)["messages"] == expected)
        }

        @available(macOS 27, iOS 27, *)
        @Test func snapshotsGrow() async throws {
            let server = try FaultServer([.read, .send(Answer.chat)])
            var snapshots: [String] = []
            for try await snapshot in LanguageModelSession(model: model(server)).streamResponse(to: "Hello") {
                snapshots.append(snapshot.content)
            }
            #expect(snapshots.first == "Grü" && snapshots.last == "Grüße 🙂")
            #expect(zip(snapshots, snapshots.dropFirst()).allSatisfy { $1.hasPrefix($0) })
        }

        @available(macOS 27, iOS 27, *)
        @Test func theSessionRunsTheToolsThatTheModelCalls() async throws {
            let server = try FaultServer([.read, .send(Self.call)], [.read, .send(Answer.chat)])
            let session = LanguageModelSession(model: model(server), tools: [SessionCases.Weather()], instructions: "Help.")
            #expect(try await session.respond(to: "Rome?").content == "Grüße 🙂")
            let expected: JSONValue = [
                ["role": "system", "content": "Help."], ["role": "user", "content": "Rome?"],
                [
                    "role": "assistant", "content": "Let me look.",
                    "tool_calls": [
                        ["id": "call_1", "type": "function", "function": ["name": "weather", "arguments": "{\"city\": \"Rome\"}"]]
                    ],
                ],
                ["role": "tool", "content": "14 °C in Rome", "tool_call_id": "call_1"],
            ]
            #expect(try body(server, 1)["messages"] == expected)
            #expect(try body(server, 0)["tools"] == body(server, 1)["tools"])
        }

        @available(macOS 27, iOS 27, *)
        @Test func aGuidedAnswerIsAType() async throws {
            let json = #"{"content":"{\"city\": \"Bern\"}"}"#
            let answer = Answer.stream([Answer.delta(json), Answer.delta("{}", finish: #""stop""#), Answer.usage, Answer.done])
            let server = try FaultServer([.read, .send(answer)])
            let place = try await LanguageModelSession(model: model(server)).respond(to: "A city?", generating: SessionCases.Place.self)
            #expect(place.content == SessionCases.Place(city: "Bern"))
            #expect(try body(server, 0)["response_format"]?["json_schema"]?["name"] == "Place")
        }

        @available(macOS 27, iOS 27, *)
        @Test func prewarmingAsksForNoTokens() async throws {
            let server = try FaultServer([.read, .send(Answer.chat)])
            let session = LanguageModelSession(model: model(server), tools: [SessionCases.Weather()], instructions: "Help.")
            session.prewarm(promptPrefix: Prompt("Weather in"))
            #expect(await eventually { server.requests.count == 1 })
            _ = try await session.respond(to: "Weather in Rome?")
            let (warm, asked) = (try body(server, 0), try body(server, 1))
            #expect(warm["max_tokens"] == 0 && warm["tools"] == asked["tools"])
            #expect(warm["messages"] == [["role": "system", "content": "Help."], ["role": "user", "content": "Weather in"]])
        }

        @available(macOS 27, iOS 27, *)
        @Test func prewarmingWithoutAPromptLetsAnEmptyOneStandForIt() async throws {
            let server = try FaultServer([.read, .send(Answer.chat)])
            LanguageModelSession(model: model(server), instructions: "Help.").prewarm()
            #expect(await eventually { server.requests.count == 1 })
            #expect(try body(server, 0)["messages"] == [["role": "system", "content": "Help."], ["role": "user", "content": ""]])
        }

        @available(macOS 27, iOS 27, *)
        @Test func cancellingClosesTheConnection() async throws {
            let server = try FaultServer([.read, .send(Answer.stream([Answer.delta(#"{"content":"Half"}"#)], end: false)), .hold])
            let session = LanguageModelSession(model: model(server))
            let task = Task { try await session.respond(to: "Hello").content }
            #expect(await eventually { server.requests.count == 1 })
            task.cancel()
            await #expect(throws: CancellationError.self) { try await task.value }
            #expect(await eventually { server.departures.count == 1 })
        }

        @available(macOS 27, iOS 27, *)
        @Test func aServerThatDoesNotRunKeepsItsOwnError() async throws {
            let model = MLXInferLanguageModel(endpoint: .unix(path: try FaultServer.stalePath()), reconnect: .never)
            let error = await #expect(throws: MLXInferError.self) { try await LanguageModelSession(model: model).respond(to: "Hello") }
            guard case .serverNotRunning = error else {
                Issue.record("\(String(describing: error))")
                return
            }
        }

        @available(macOS 27, iOS 27, *)
        @Test func capabilitiesAreWhatTheAppSays() {
            let all = MLXInferLanguageModel().capabilities
            #expect(all.contains(.guidedGeneration) && all.contains(.toolCalling) && all.contains(.reasoning) && all.contains(.vision))
            let few = MLXInferLanguageModel(capabilities: [.toolCalling]).capabilities
            #expect(few.contains(.toolCalling) && !few.contains(.vision))
            #expect(MLXInferLanguageModel(model: "a").executorConfiguration == MLXInferLanguageModel(model: "a").executorConfiguration)
            #expect(MLXInferLanguageModel(model: "a").executorConfiguration != MLXInferLanguageModel(model: "b").executorConfiguration)
        }
    }

    @available(macOS 27, iOS 27, *)
    extension SessionCases {
        struct Place: Generable, Equatable {
            var city: String

            static var generationSchema: GenerationSchema { SessionCases.place }
            init(city: String) { self.city = city }
            init(_ content: GeneratedContent) throws { city = try content.value(String.self, forProperty: "city") }
            var generatedContent: GeneratedContent { GeneratedContent(properties: ["city": city]) }
        }

        struct Weather: FoundationModels.Tool {
            let name = "weather"
            let description = "The weather in a city"
            func call(arguments: Place) async throws -> String { "14 °C in \(arguments.city)" }
        }
    }
#endif
